"""Creating a name that exactly one of several callers gets, in a store that refuses no second one.

    1. the name is there             somebody was first: no
    2. write a claim of my own       .tmp-claim-<name>-<token>, beside it
    3. list the folder               claims of others there: take mine away, wait a little, go to 1
    4. look for the name again       there: no
    5. write it, take my claim away  yes

It needs a store whose lists show what was written before they were asked for, which S3, Google's
and Azure's do. Of two that write claims, the one who lists later sees the other's, or finds its
name; if both see both, both go back, and wait for times drawn at random. A claim that its writer
left behind when it died counts for a minute, by the store's clock: a process that stands still for
longer than that between 3 and 5, and then goes on, could write over what was created meanwhile.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import TierUnavailable
from trainckpt.tiers.calls import draw_own

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.tiers.object_client import Entry


CLAIM = ".tmp-claim-"
STALE_S = 60.0
_TRY_FOR_S, _PAUSE_S, _LONGEST_PAUSE_S = 90.0, 0.05, 2.0


class Store(Protocol):
    """What is needed of one. Keys are relative to the run's place."""

    url: str

    def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""

    def replace(self, key: str, data: bytes) -> None:
        """Write an object, whatever was there."""

    def entries(self, folder: str) -> Sequence[Entry]:
        """All names in a folder."""

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
    """Create `key`; False, and nothing changed, if it exists.

    Raises:
        TierUnavailable: others claim it, and none of them creates it.
    """
    begun_s, bound_s = clock(), _PAUSE_S
    while store.size(key) is None:
        created = _try(store, key, data)
        if created is not None:
            return created
        if clock() - begun_s > _TRY_FOR_S:
            folder = key.rpartition("/")[0]
            raise TierUnavailable(
                f"{store.url}: {key} is claimed by others, and none creates it",
                hint=f"if nobody does, remove what begins with {CLAIM} from {folder}/",
            )
        sleep(draw() * bound_s)
        bound_s = min(2 * bound_s, _LONGEST_PAUSE_S)
    return False


def _try(store: Store, key: str, data: bytes) -> bool | None:
    """One round; None: a tie."""
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
    """Claims of others that count."""
    mine = next((each.modified_s for each in claims if each.name == own), None)

    def is_stale(other: Entry) -> bool:
        if mine is None or other.modified_s is None:
            return False
        return mine - other.modified_s > STALE_S

    return [each for each in claims if each.name != own and not is_stale(each)]
