"""Create a name for exactly one of several callers, in a store without conditional creation.

    1. check the name              exists: return False
    2. write a claim               .tmp-claim-<name>-<token>, beside it
    3. list the folder             other claims: remove the own one, wait a little, go to 1
    4. check the name again        exists: return False
    5. write it, remove the claim  return True

The store's lists must show every earlier write, as with S3, Google and Azure. Of two callers with
claims, the later to list sees the other's claim or finds the name. If both see both, both withdraw
and wait for random times. A dead caller's claim counts for a minute, by the store's clock. So a
caller suspended for longer between 3 and 5 could overwrite a name created meanwhile.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import TierUnavailable
from trainckpt.storage.retry import draw_own

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.storage.object_client import Entry


CLAIM = ".tmp-claim-"
STALE_S = 60.0
_TRY_FOR_S, _PAUSE_S, _LONGEST_PAUSE_S = 90.0, 0.05, 2.0


class Store(Protocol):
    """Requests needed from a store. Keys are relative to the run directory."""

    url: str

    def size(self, key: str) -> int | None:
        """Return the bytes of an object; None if it is missing."""

    def replace(self, key: str, data: bytes) -> None:
        """Write an object over any old one."""

    def entries(self, folder: str) -> Sequence[Entry]:
        """Return all names in a folder."""

    def remove(self, key: str) -> None:
        """Remove an object."""


def create(
    store: Store,
    key: str,
    data: bytes,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    draw: Callable[[], float] = draw_own,
) -> bool:
    """Create `key` with `data`; return False, and change nothing, if it exists.

    Raises:
        TierUnavailable: other callers claim it, and none creates it.
    """
    begun_s, bound_s = clock(), _PAUSE_S
    while store.size(key) is None:
        created = _try(store, key, data)
        if created is not None:
            return created
        if clock() - begun_s > _TRY_FOR_S:
            folder = key.rpartition("/")[0]
            raise TierUnavailable(
                f"{store.url}: cannot create {key}: other processes claim it and do not create it",
                hint=f"if no process is left, remove the objects named {CLAIM}* from {folder}/",
            )
        sleep(draw() * bound_s)
        bound_s = min(2 * bound_s, _LONGEST_PAUSE_S)
    return False


def _try(store: Store, key: str, data: bytes) -> bool | None:
    """Run one round; return None after a tie."""
    folder, _, name = key.rpartition("/")
    prefix = f"{CLAIM}{name}-"
    own = f"{prefix}{secrets.token_hex(8)}"
    claim = f"{folder}/{own}" if folder else own
    store.replace(claim, b"claim\n")
    try:
        claims = [each for each in store.entries(folder) if each.name.startswith(prefix)]
        if store.size(key) is not None:
            return False
        if _others(claims, own):
            return None
        store.replace(key, data)
        return True
    finally:
        store.remove(claim)


def _others(claims: Sequence[Entry], own: str) -> list[Entry]:
    """Return the claims of other callers, without stale ones."""
    mine = next((each.modified_s for each in claims if each.name == own), None)

    def is_stale(other: Entry) -> bool:
        if mine is None or other.modified_s is None:
            return False
        return mine - other.modified_s > STALE_S

    return [each for each in claims if each.name != own and not is_stale(each)]
