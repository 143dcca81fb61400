"""Mappings of shard files in this host's memory, for readers. `arena.Arena` writes them.

`Mapped` closes its file's descriptor with the mapping. A forked child, such as a loader worker,
gets neither mapping nor descriptor. It would keep a nameless file alive until its own end, and
could not be dumped. `MappedShard` adds the read lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref

from trainckpt.storage.direct_io import populate


class Mapped(mmap.mmap):
    """A mapping owning a descriptor of its file, as long as any view of it exists."""

    _descriptor = -1

    def __new__(cls, descriptor: int, num_bytes: int, flags: int) -> Mapped:
        """Map a file; the mapping closes the descriptor. After an error the caller keeps it."""
        writable = mmap.PROT_READ | mmap.PROT_WRITE  # torch warns about read-only memory
        mapping = super().__new__(cls, descriptor, num_bytes, flags, writable)
        not_for_children(mapping)
        _mapped.add(mapping)
        mapping._descriptor = descriptor
        return mapping

    @property
    def descriptor(self) -> int:
        """Return the file's descriptor, while it is mapped."""
        return self._descriptor

    def forked(self) -> None:
        """Release the file in a forked child.

        Its descriptors, including the mapping's own, become descriptors of /dev/null. Closing them
        later closes no other file.
        """
        file = os.fstat(self._descriptor)
        if stat.S_ISCHR(file.st_mode):
            return  # replaced already, for another mapping of the same file
        nothing = os.open(os.devnull, os.O_RDONLY)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the bare numbers
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(nothing, int(name))
        os.close(nothing)

    def __del__(self) -> None:
        with contextlib.suppress(BufferError):
            self.close()  # releases the GIL; a plain deallocation would not
        if self._descriptor >= 0:
            os.close(self._descriptor)


def not_for_children(mapping: mmap.mmap) -> None:
    """Exclude a mapping from processes forked from now on, if the system can."""
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
            _not_there.add(mapping)


_mapped: weakref.WeakSet[Mapped] = weakref.WeakSet()
_not_there: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # unmapped in a child
_kept: list[mmap.mmap] = []  # in a child: never deallocated


def _forked() -> None:
    _kept.extend(_not_there)  # unmapping here would unmap newer memory at the same address
    _not_there.clear()  # nothing left to exclude from this child's own children
    for mapping in list(_mapped):
        _mapped.discard(mapping)
        with contextlib.suppress(OSError):
            mapping.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


STEP_BYTES = 1 << 20  # small enough to stay in CPU caches until verified


class MappedShard:
    """Bytes of one shard file, mapped and locked against writers.

    Attributes:
        data: The whole file. Read-only by contract; a write goes to a private copy of the page.
    """

    def __init__(self, mapping: LockedMapping) -> None:
        self.data = memoryview(mapping)
        self._file: LockedMapping | None = mapping

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Copy from `first_byte` on until `into` is full.

        Bytes for pages in use come by a system call, without mapping the file's pages.

        Raises:
            OSError: the file is too short, was closed, or as the system reports it.
        """
        file = self._file
        if file is None:
            raise OSError("the file in memory was closed")
        if first_byte + len(into) > len(self.data):
            raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
        for start in range(0, len(into), STEP_BYTES):
            part = into[start : start + STEP_BYTES]
            populate(part)  # by itself that takes as long as the copy, and inside of it longer
            done = 0
            while done < len(part):
                read = os.preadv(file.descriptor, [part[done:]], first_byte + start + done)
                if not read:
                    raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
                done += read

    def close(self) -> None:
        """Unlock the file once no view of it is left."""
        self.data, self._file = memoryview(b""), None


class LockedMapping(Mapped):
    """A mapping keeping its file locked as long as any view of it exists."""

    def __new__(cls, descriptor: int, num_bytes: int) -> LockedMapping:
        """Map a file locked by this descriptor; the mapping closes it."""
        mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_PRIVATE)  # never written
        assert isinstance(mapping, cls)
        return mapping
