"""Handed memory: fresh memory of one process that other processes of its host fill.

What one process has read and several need lies in a cache when it was read. It makes the others'
pages of it then, through the descriptor by which they handle their own faults (`userfault`), which
they let it borrow. So nobody copies it from one memory to another.

    Offered   memory of this process, which others may fill until it is taken back. Nobody here may
              touch it before that: where nothing was made, that would end the process (SIGBUS)
    Filler    fills memory of another process, as long as that one offers it

Whoever may read a process's memory may borrow its descriptor as well; what comes is to be verified.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import userfault
from trainckpt.tiers.direct import HUGE_BYTES, PAGE_BYTES, address, libc
from trainckpt.tiers.fresh_memory import is_fresh, pages

STEP_BYTES = HUGE_BYTES  # of one call, in which the other process cannot lay out its memory anew


class Offered:
    """Memory that others may fill; used by any threads."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(userfault.filling())
        self._there: dict[int, tuple[int, int]] = {}  # where a block lies -> its whole pages
        self._back: dict[int, tuple[int, int]] = {}  # of those that were taken back all at once
        self._lock = threading.Lock()

    @property
    def descriptor(self) -> int | None:
        """By which others fill it."""
        return userfault.descriptor()

    def offer(self, block: memoryview) -> bool:
        """Whether others may fill its whole pages now: the system can, and nobody touched it."""
        descriptor = self.descriptor
        if descriptor is None or not is_fresh(block):
            return False
        where = address(block) or 0
        begin, end = pages(where, len(block))
        with self._lock:
            if not userfault.charge(descriptor, begin, end - begin):
                return False
            self._there[where] = begin, end
        return True

    def take_back(self, block: memoryview) -> bool:
        """Nobody else fills it any more; whether somebody has, as far as its ends show.

        Raises:
            UnusableSnapshot: the system keeps it in that charge, so nobody may touch it.
        """
        where = address(block) or 0
        with self._lock:
            if where in self._there:
                self._discharge(where)
            begin, end = self._back.pop(where, (0, 0))
        return begin < end and _is_there(begin) and _is_there(end - PAGE_BYTES)

    def close(self) -> None:
        """Take all back; errors as `take_back`, which still tells what was filled."""
        with self._lock, self._stack:
            for where in list(self._there):
                self._discharge(where)

    def _discharge(self, where: int) -> None:
        begin, end = self._there[where]
        descriptor = self.descriptor
        if descriptor is None or not userfault.discharge(descriptor, begin, end - begin):
            raise UnusableSnapshot(f"{end - begin} bytes of memory cannot be filled")
        self._back[where] = self._there.pop(where)


class Filler:
    """Fills what another process offers; used by any threads.

    Raises:
        OSError: there is no such process, or what it offers cannot be had.
    """

    def __init__(self, process: int, descriptor: int) -> None:
        self._descriptor: int | None = userfault.borrow(process, descriptor)

    def fill(self, where: int, data: memoryview) -> bool:
        """Make the whole pages of what lies at `where` there, with what of `data` belongs to them.

        Whether that was done: else it is no memory that is offered, or not any more.
        """
        source = address(data)
        begin, end = pages(where, len(data))
        if source is None or self._descriptor is None or begin == end:
            return False
        for at in range(begin, end, STEP_BYTES):
            size = min(STEP_BYTES, end - at)
            if userfault.make_pages(self._descriptor, at, source + at - where, size) < size:
                return False
        return True

    def close(self) -> None:
        """Once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            userfault.give_back(descriptor)


def ends(where: int, num_bytes: int) -> list[tuple[int, int]]:
    """What a `Filler` leaves out of a block: of each run its first byte, and the one behind it."""
    begin, end = pages(where, num_bytes)
    runs = [(0, begin - where), (end - where, num_bytes)]
    return [(first, last) for first, last in runs if first < last]


def _is_there(page: int) -> bool:
    found = (ctypes.c_ubyte * 1)()
    size = ctypes.c_size_t(PAGE_BYTES)
    return libc().mincore(ctypes.c_void_p(page), size, found) == 0 and bool(found[0] & 1)
