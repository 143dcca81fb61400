"""A host's view of a file server that others write to as well: python -m tests.chaos.late_disk

It keeps names, attributes and listings for a while, as NFS clients do: also the answer that a name
is not there. So a host may not see for 3 s what another one has written. Its own changes it sees at
once, and whoever creates a name asks the server.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from tests.chaos.disk import Disk, Mounted
from tests.faults import refusing
from tests.faults.refusing import ATTRIBUTES, ENTRY, STAT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEPT_S = 3  # as the shortest of NFS
LOOK_UP = 1
CHANGES = frozenset({9, 10, 11, 12, 13, 35, 45})


class LateDisk(Disk):
    """Answers for one host; it keeps them for `KEPT_S`."""

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self.listings: dict[int, tuple[float, list[str]]] = {}

    def answer(self, opcode: int, node: int, body: memoryview) -> tuple[int, bytes]:
        code, answer = super().answer(opcode, node, body)
        if opcode in CHANGES:
            self.listings.clear()
        if opcode == LOOK_UP and code == errno.ENOENT:
            return 0, ENTRY.pack(0, 0, KEPT_S, 0, 0, 0) + bytes(STAT.size)
        return code, answer

    def entry(self, node: int, name: memoryview) -> bytes:
        found = super().entry(node, name)
        number, *_ = ENTRY.unpack_from(found)
        return ENTRY.pack(number, 0, KEPT_S, KEPT_S, 0, 0) + found[ENTRY.size :]

    def attributes(self, node: int, body: memoryview) -> bytes:
        return ATTRIBUTES.pack(KEPT_S, 0, 0) + super().attributes(node, body)[ATTRIBUTES.size :]

    def names(self, handle: int) -> list[str]:
        folder = os.fstat(handle).st_ino
        read_s, found = self.listings.get(folder, (0.0, []))
        if monotonic() - read_s > KEPT_S:
            found = super().names(handle)
            self.listings[folder] = monotonic(), found
        return found

    ACTS: ClassVar[dict[int, Any]] = {**Disk.ACTS, LOOK_UP: entry, 3: attributes}


@contextmanager
def mounted(folder: Path, backing: Path) -> Iterator[Mounted]:
    """A host's view of `backing` in `folder`, for as long as the block lasts."""
    with refusing.mounted(folder, backing, __name__) as server:
        yield Mounted(folder, backing, server)


if __name__ == "__main__":
    refusing.serve(LateDisk)
