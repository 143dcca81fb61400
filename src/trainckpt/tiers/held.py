"""Held: a shard file in this host's memory, as a reader has it. The mirror of `arena.Arena`."""

from __future__ import annotations

import mmap
import os

from trainckpt.tiers.direct import address, populate
from trainckpt.tiers.fresh_memory import is_fresh, make
from trainckpt.tiers.mapped import Mapped

STEP_BYTES = 1 << 20  # that caches hold from when they are made until they are copied to


class Held:
    """The bytes of one shard file, held in memory and locked against being written.

    Attributes:
        data: All of it. Not to be written; whoever does all the same writes to a copy of its own.
    """

    def __init__(self, mapping: Locked) -> None:
        self.data = memoryview(mapping)
        self._file: Locked | None = mapping

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Copy as many bytes as `into` has. What is written to other pages is not mapped for it.

        Raises:
            OSError: it does not have them, it was closed, or as the system reports it.
        """
        if self._file is None:
            raise OSError("the file in memory was closed")
        if first_byte + len(into) > len(self.data):
            raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
        for done in range(0, len(into), STEP_BYTES):
            part, at = into[done : done + STEP_BYTES], first_byte + done
            if is_fresh(part):
                # Pages are made of what the mapping shows: to read it to a buffer first costs more
                # than to map sixteen pages at once.
                make(part, self.data[at : at + len(part)], self._read)
            else:
                populate(part)  # by itself that takes as long as the copy, and inside of it longer
                self._read(part, self.data[at : at + len(part)])

    def _read(self, into: memoryview, data: memoryview) -> None:
        """What a view of the mapping shows, from the file, which may be shorter: `OSError`."""
        assert self._file is not None
        if not len(into):
            return
        first_byte = (address(data) or 0) - (address(self.data) or 0)
        done = 0
        while done < len(into):
            got = self._file.read_at(first_byte + done, into[done:])
            if not got:
                raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
            done += got

    def close(self) -> None:
        """Let it be written again, once nobody has a view of it any more."""
        self.data, self._file = memoryview(b""), None


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
