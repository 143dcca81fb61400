"""Mapped: a mapping that has its file to itself: it closes it, and no forked process keeps it.

Processes that are forked meanwhile, such as a loader's workers, have neither: they would keep a
file that is soon without a name for as long as they live, and could not be dumped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref


class Mapped(mmap.mmap):
    """A mapping that keeps a descriptor of its file as long as anybody has a view of it."""

    _descriptor = -1

    def __new__(cls, descriptor: int, num_bytes: int, flags: int) -> Mapped:
        """Map a file; this descriptor of it is closed with the mapping. Errors as `mmap`'s, and
        then whoever called has the descriptor.
        """
        writable = mmap.PROT_READ | mmap.PROT_WRITE  # torch warns of memory that is not
        mapping = super().__new__(cls, descriptor, num_bytes, flags, writable)
        not_for_children(mapping)
        _mapped.add(mapping)
        mapping._descriptor = descriptor
        return mapping

    @property
    def descriptor(self) -> int:
        """Of the file, as long as it is mapped."""
        return self._descriptor

    def forked(self) -> None:
        """In a child: let go of the file. Its descriptors, of which the mapping itself has one,
        become those of nothing, so that closing them closes nobody else's.
        """
        file = os.fstat(self._descriptor)
        if stat.S_ISCHR(file.st_mode):
            return  # with another mapping of the same file
        nothing = os.open(os.devnull, os.O_RDONLY)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the bare numbers
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(nothing, int(name))
        os.close(nothing)

    def __del__(self) -> None:
        with contextlib.suppress(BufferError):
            self.close()  # other threads run meanwhile, as they do not where it is only forgotten
        if self._descriptor >= 0:
            os.close(self._descriptor)


def not_for_children(mapping: mmap.mmap) -> None:
    """Processes that are forked from now on have no page of it, if the system knows how."""
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
            _not_there.add(mapping)


_mapped: weakref.WeakSet[Mapped] = weakref.WeakSet()
_not_there: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # in a child
_kept: list[mmap.mmap] = []  # by a forked process


def _forked() -> None:
    _kept.extend(_not_there)  # to unmap it here would unmap what lies there by now
    _not_there.clear()  # what this process forks has nothing of it
    for mapping in list(_mapped):
        _mapped.discard(mapping)
        with contextlib.suppress(OSError):
            mapping.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
