"""What every tier does, as a sequence of calls.

Any mix of calls, from several threads. Keys are relative paths with `/`.

    write    new bytes under a new key. When it returns they survive a power cut. Not atomic:
             nothing may refer to the key before `write` returned. Each block is done with when the
             next is asked for; with `held`, when so many others behind it were asked for, so that
             several are on their way. With `num_bytes`, space is made for so many bytes first. With
             `replacing` the key may be there: what stands there stays until all the new bytes are
             durable, and if that fails.
    write_parts  as `write`, of so many bytes that come as (first byte, memory), in any order, each
             byte once; all that memory must stay as it is until the call returns. If it fails, or
             what gives the parts raises, there is no key.
    replace  atomic: readers see the old bytes or the new ones, before and after a power cut.
    create   atomic, and exactly one of several callers gets True.
    read_parts  each memory is filled from its first byte on, several at once; `done` is told the
             number of each one, from any thread, as soon as it is full. What `done` raises ends
             the rest, and is raised. Nobody writes to any of it when the call returned.
    list     names in one folder; an absent folder is an empty list, a denied one an error.
    remove   what is gone already is no error. A folder of which files are kept stays. What is to be
             reused was written by nobody but this run's ranks, is complete, and nothing refers to
             it: its bytes may be overwritten by the next file of that name, until `clear_spares`
             deletes what is kept for that.
    clear_unfinished  what writers that died have left in a folder, of keys they were replacing. One
             that is alive fails.

An absent key is `UnusableSnapshot`, anything the place refuses is `TierUnavailable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


class Readable(Protocol):
    """Where bytes can be read, whoever wrote them."""

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
    """One place for bytes, with a speed and a lifetime."""

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
    def remove_folder(
        self, folder: str, keep: Collection[str] = (), *, reuse: bool = False
    ) -> None: ...
    def clear_spares(self) -> None: ...
    def clear_unfinished(self, folder: str) -> None: ...
