"""Held: a shard file in this host's memory, as a reader has it. The mirror of `arena.Arena`."""

from __future__ import annotations

import mmap
import os
import threading

from trainckpt.tiers.direct import memory, populate
from trainckpt.tiers.fresh_memory import fill, is_fresh
from trainckpt.tiers.mapped import Mapped

STEP_BYTES = 1 << 20  # that caches hold from when they are made until they are copied to
_own = threading.local()


class Held:
    """The bytes of one shard file, held in memory and locked against being written.

    Attributes:
        data: All of it. Not to be written; whoever does all the same writes to a copy of its own.
    """

    def __init__(self, mapping: Locked) -> None:
        self.data = memoryview(mapping)
        self._file: Locked | None = mapping

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Copy as many bytes as `into` has. What is only copied is not mapped, page by page.

        Raises:
            OSError: it does not have them, it was closed, or as the system reports it.
        """
        done = 0
        if self._file is None:
            raise OSError("the file in memory was closed")
        while done < len(into):
            part = into[done : done + STEP_BYTES]
            fresh = is_fresh(part)
            if not fresh:
                populate(part)  # by itself that takes as long as the copy, and inside of it longer
            got = self._file.read_at(first_byte + done, _buffer(len(part)) if fresh else part)
            if not got:
                raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
            if fresh:
                fill(part[:got], _buffer(got))
            done += got

    def close(self) -> None:
        """Let it be written again, once nobody has a view of it any more."""
        self.data, self._file = memoryview(b""), None


def _buffer(num_bytes: int) -> memoryview:
    """Of this thread."""
    if not hasattr(_own, "buffer"):
        _own.buffer = memory(STEP_BYTES)
    found: memoryview = _own.buffer
    return found[:num_bytes]


class Locked(Mapped):
    """A mapping that keeps the lock of its file as long as anybody has a view of it."""

    def __new__(cls, descriptor: int, num_bytes: int) -> Locked:
        """Map a file that this descriptor has locked; it is closed with the mapping."""
        mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_PRIVATE)  # never written to
        assert isinstance(mapping, cls)
        return mapping

    def read_at(self, first_byte: int, into: memoryview) -> int:
        """Read from the file; how many bytes came."""
        return os.preadv(self._descriptor, [into], first_byte)
