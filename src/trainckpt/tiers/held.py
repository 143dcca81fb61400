"""Held: a shard file in this host's memory, as a reader has it. The mirror of `arena.Arena`."""

from __future__ import annotations

import mmap
import os
from functools import partial

from trainckpt.tiers.direct import address, populate
from trainckpt.tiers.fresh_memory import is_fresh, make
from trainckpt.tiers.mapped import Mapped

STEP_BYTES = 1 << 20  # that caches hold until it is verified
Stamp = tuple[int, ...]
NUM_STAMPS = 6


def stamp_of(descriptor: int) -> Stamp | None:
    """Of a published file: another one, once it was written to by a call, or its arena anew.

    To write through a mapping leaves a file's times alone. But whoever fills an arena anew takes
    its names away before (`Arena.reserve`), and that changes them; nobody else maps it to write.
    None: it would not show there (what has links for names, a memfd).
    """
    status = os.fstat(descriptor)
    if status.st_nlink < 2:  # the arena's own, and a snapshot's
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, status.st_nlink, *times


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
        file, data = self._file, self.data
        if file is None:
            raise OSError("the file in memory was closed")
        if first_byte + len(into) > len(data):
            raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
        for done in range(0, len(into), STEP_BYTES):
            part, at = into[done : done + STEP_BYTES], first_byte + done
            shown = data[at : at + len(part)]
            if is_fresh(part):
                # Pages are made of what the mapping shows: to read it to a buffer first costs more
                # than to map sixteen pages at once.
                make(part, shown, partial(file.read_shown, at, shown))
            else:
                populate(part)  # by itself that takes as long as the copy, and inside of it longer
                file.read_shown(at, shown, part, shown)

    @property
    def stamp(self) -> Stamp | None:
        """As `stamp_of`; None also once it was closed."""
        return stamp_of(self._file.descriptor) if self._file is not None else None

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

    def read_shown(
        self, first_byte: int, shown: memoryview, into: memoryview, data: memoryview
    ) -> None:
        """Read from the file what `data` shows of it, inside of what is shown from a byte on.

        Raises:
            OSError: the file is shorter by now.
        """
        if not len(into):
            return
        at, done = first_byte + (address(data) or 0) - (address(shown) or 0), 0
        while done < len(into):
            got = os.preadv(self._descriptor, [into[done:]], at + done)
            if not got:
                raise OSError(f"the file in memory ends before byte {at + len(into)}")
            done += got
