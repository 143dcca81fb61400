"""Write watch: memory of this process, and whether anybody has written there since.

To find out by digests that a large state is as it was takes a tenth of a second per GB and more.
The system knows it for each page, if it is asked to mark them: a write takes a page's mark off, by
whatever way a processor makes it: this program, a library, another process, or the system itself,
which reads a file there (`userfault`; the manual pages userfaultfd(2) and proc_pid_pagemap(5)
describe the marks, and where they are seen). Only a page of this process alone that is there and
still has its mark was not written to. A device that was lent memory before writes past the marks.

Floor 0. Uses: tiers.userfault. Used by: state.given.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect, insort
from mmap import PAGESIZE
from typing import TYPE_CHECKING

from trainckpt.tiers import userfault

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRY_BYTES = 8  # of a page, in /proc/self/pagemap
_HIGHEST = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
# Bits of the highest byte of an entry, as they are where nobody has written: the page is there,
# neither swapped nor of a file nor shared (others' writes take their own marks off alone, and what
# is gone of a file may keep a mark without a page), and has its mark.
_WANTED = 1 << 63 - 56 | 1 << 57 - 56
_LOOKED_AT = _WANTED | 1 << 62 - 56 | 1 << 61 - 56
# That byte -> 1, 0 where it may have been written to.
_MARKS = bytes(byte & _LOOKED_AT == _WANTED for byte in range(256))


class WriteWatch:
    """Some memory of this process. To a forked process all of it seems written to."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._process = 0
        self._marked: list[tuple[int, int]] = []
        self._is_refused = False

    def begin(self, where: int, num_bytes: int) -> bool:
        """Watch the whole pages among these bytes; False: the system does not let us.

        Nor what is watched already, all or in part: to mark it again would hide who wrote there.
        Who writes there for the first time waits for a page fault.
        """
        first, end = -(-where // PAGESIZE) * PAGESIZE, (where + num_bytes) // PAGESIZE * PAGESIZE
        if self._is_refused or first >= end or self._watches(first, end):
            return False
        if self._descriptor is None:
            self._descriptor, self._process = userfault.watcher(), os.getpid()
            self._is_refused = self._descriptor is None
        if self._descriptor is None or self._process != os.getpid():
            return False
        if not userfault.mark(self._descriptor, first, end - first):
            return False
        insort(self._marked, (first, end))
        return True

    def _watches(self, first: int, end: int) -> bool:
        """Any page of these."""
        at = bisect(self._marked, (first, end))
        before, behind = self._marked[:at][-1:], self._marked[at : at + 1]
        return any(a < end and first < b for a, b in before + behind)

    def written(self, where: int, num_bytes: int) -> list[tuple[int, int]] | None:
        """What of these bytes lies on pages that somebody may have written to: begins and ends.

        They count from `where`. What is not watched counts as written, as do ends that are no whole
        pages. None: nobody knows. Any thread.
        """
        if self._descriptor is None:
            return None
        first, size = _pages(where, num_bytes)
        num_pages = size // PAGESIZE
        try:
            # opened anew: a descriptor would go on to show the memory of whoever opened it
            pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                entries = os.pread(
                    pages, num_pages * _ENTRY_BYTES, first // PAGESIZE * _ENTRY_BYTES
                )
            finally:
                os.close(pages)
        except OSError:
            return None
        marks = entries[_HIGHEST::_ENTRY_BYTES].translate(_MARKS)
        if len(marks) != num_pages:
            return None
        # Ends that are no whole pages were not marked for these bytes, whoever marked them.
        marks = marks if where == first else b"\0" + marks[1:]
        marks = marks if where + num_bytes == first + size else marks[:-1] + b"\0"
        return [
            (
                max(first + begin * PAGESIZE - where, 0),
                min(first + end * PAGESIZE - where, num_bytes),
            )
            for begin, end in _runs(marks)
        ]

    def end(self) -> None:
        """Watch nothing any more."""
        descriptor, self._descriptor = self._descriptor, None
        marked, self._marked = self._marked, []
        if descriptor is None or self._process != os.getpid():
            return
        for first, end in marked:
            userfault.discharge(descriptor, first, end - first)
        userfault.give_back(descriptor)

    def __del__(self) -> None:
        self.end()  # no dump could hold the descriptor


def _pages(where: int, num_bytes: int) -> tuple[int, int]:
    """The first byte of the pages that these bytes lie on, and how many there are."""
    first = where // PAGESIZE * PAGESIZE
    return first, -(-(where + num_bytes) // PAGESIZE) * PAGESIZE - first


def _runs(marks: bytes) -> Iterator[tuple[int, int]]:
    """The unmarked: first ones, and those behind the last."""
    end = 0
    while (begin := marks.find(0, end)) >= 0:
        end = marks.find(1, begin)
        end = end if end >= 0 else len(marks)
        yield begin, end
