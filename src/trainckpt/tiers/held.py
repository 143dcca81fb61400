"""Held: a shard file in this host's memory, as a reader has it. The mirror of `arena.Arena`."""

from __future__ import annotations

import mmap
import os


class Held:
    """The bytes of one shard file, held in memory and locked against being written.

    Attributes:
        data: All of it. Not to be written; whoever does all the same writes to a copy of its own.
    """

    def __init__(self, mapping: Locked) -> None:
        self.data = memoryview(mapping)

    def close(self) -> None:
        """Let it be written again, once nobody has a view of it any more."""
        self.data = memoryview(b"")


class Locked(mmap.mmap):
    """A mapping that keeps the lock of its file as long as anybody has a view of it."""

    _descriptor = -1

    def __new__(cls, descriptor: int, num_bytes: int) -> Locked:
        """Map a file that this descriptor has locked; it is closed with the mapping."""
        writable = mmap.PROT_READ | mmap.PROT_WRITE  # else torch warns; privately, so never there
        mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_PRIVATE, writable)
        mapping._descriptor = descriptor
        return mapping

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
