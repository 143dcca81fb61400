"""Contract of every tier, as a sequence of calls, and the types of tiers.

Any mix of calls, from several threads. Keys are relative paths with `/`.

    write    new bytes under a new key. On return they survive a power cut. Not atomic: nothing may
             refer to the key before `write` returned. The caller may reuse a block once the next
             one is requested; with `held`, once that many later ones are, so several are in
             flight. With `num_bytes`, that space is reserved first. With `replacing` the key may
             exist: the old bytes stay until all new ones are durable, and if that fails.
    write_parts  as `write`, for `num_bytes` coming as (first byte, memory), in any order, each byte
             once. All memory must stay unchanged until the call returns. If the call or the
             iterator of parts fails, there is no key.
    replace  atomic: readers see the old bytes or the new ones, before and after a power cut.
    create   atomic, and exactly one of several callers gets True.
    read_parts  fill each memory from its first byte on, several at once. `done` gets the number of
             each part once full, on any thread. An error of `done` ends the rest, and is raised.
             After the call returned nothing writes to the memory.
    list     names in one folder; an absent folder is an empty list, a denied one an error.
    remove   a missing key is no error. A folder with files in `keep` stays.
    clear_unfinished  remove remains of dead writers in a folder, for keys being replaced. A live
             writer fails.

An absent key is `UnusableSnapshot`; any refusal of the location is `TierUnavailable`.

A run directory is a local directory or a location in an object store. The two differ in files
beyond records (notices, heartbeats, a crash marker), in capabilities, and in the timeout of a call.
There callers check the type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from trainckpt.storage.retry import Health


class Readable(Protocol):
    """Source of bytes, from any writer."""

    name: str
    url: str

    def size(self, key: str) -> int | None: ...
    def read(self, key: str, *, max_bytes: int) -> bytes: ...
    def read_into(self, key: str, first_byte: int, into: memoryview) -> None: ...
    def read_parts(
        self, key: str, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None: ...
    def list(self, folder: str) -> list[str]: ...


class Tier(Readable, Protocol):
    """One location for bytes, with a speed and a lifetime."""

    def write(
        self,
        key: str,
        blocks: Iterable[memoryview],
        num_bytes: int | None = None,
        held: int = 1,
        *,
        replacing: bool = False,
    ) -> None: ...
    def write_parts(
        self, key: str, num_bytes: int, parts: Iterable[tuple[int, memoryview]]
    ) -> None: ...
    def replace(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def remove(self, key: str) -> None: ...
    def remove_folder(self, folder: str, keep: Collection[str] = ()) -> None: ...
    def clear_unfinished(self, folder: str) -> None: ...


# What a run directory can be.
RunTier = LocalTier | ObjectStoreTier


NUM_LOOKS = 8


def num_looks(tiers: Iterable[Readable]) -> int:
    """Return the number of small reads to make at once: a store takes tens of milliseconds each."""
    return NUM_LOOKS if any(isinstance(tier, ObjectStoreTier) for tier in tiers) else 1


def health_of(tier: Tier) -> Health | None:
    """Return the state of calls to a store, as far as this process knows; None for a directory."""
    return tier.health() if isinstance(tier, ObjectStoreTier) else None
