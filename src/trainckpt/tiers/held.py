"""Held: a shard file in this host's memory, as a reader has it. The mirror of `arena.Arena`.

Processes that are forked meanwhile, such as a loader's workers, do not have it: they would keep a
file that is soon without a name for as long as they live, and could not be dumped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from trainckpt.tiers.direct import populate

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
        """Copy as many bytes as `into` has. What is only copied is not mapped, page by page.

        Raises:
            OSError: it does not have them, it was closed, or as the system reports it.
        """
        done = 0
        if self._file is None:
            raise OSError("the file in memory was closed")
        while done < len(into):
            part = into[done : done + STEP_BYTES]
            populate(part)  # by itself that takes as long as the copy, and inside of it longer
            got = self._file.read_at(first_byte + done, part)
            if not got:
                raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
            done += got

    def close(self) -> None:
        """Let it be written again, once nobody has a view of it any more."""
        self.data, self._file = memoryview(b""), None


class Locked(mmap.mmap):
    """A mapping that keeps the lock of its file as long as anybody has a view of it."""

    _descriptor = -1

    def __new__(cls, descriptor: int, num_bytes: int) -> Locked:
        """Map a file that this descriptor has locked; it is closed with the mapping."""
        writable = mmap.PROT_READ | mmap.PROT_WRITE  # else torch warns; privately, so never there
        mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_PRIVATE, writable)
        mapping._descriptor = descriptor
        if hasattr(mmap, "MADV_DONTFORK"):
            mapping.madvise(mmap.MADV_DONTFORK)
            _mapped.add(mapping)
        return mapping

    def read_at(self, first_byte: int, into: memoryview) -> int:
        """Read from the file; how many bytes came."""
        return os.preadv(self._descriptor, [into], first_byte)

    def forked(self) -> None:
        """In a child: let go of the file. Its descriptors, of which the mapping itself has one,
        become those of nothing, so that closing them closes nobody else's.
        """
        file = os.fstat(self._descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the bare numbers
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(nothing, int(name))
        os.close(nothing)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


_mapped: weakref.WeakSet[Locked] = weakref.WeakSet()


def _forked() -> None:
    for mapping in list(_mapped):
        with contextlib.suppress(OSError):
            mapping.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
