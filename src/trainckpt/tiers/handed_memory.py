"""Handed memory: fresh memory of one process that other processes of its host fill.

What one process has read and several need lies in a cache when it was read. It makes the others'
pages of it then, through the descriptor by which they handle their own faults (`userfault`), which
they let it borrow. So nobody copies it from one memory to another.

    Offered   memory of this process, which others may fill until it is taken back. Nobody here may
              touch it before that: where nothing was made, that would end the process (SIGBUS)
    Filler    fills memory of another process, as long as that one offers it

Whoever may read a process's memory may borrow its descriptor as well; what comes is to be verified.
A page is made on the memory node of who fills it, so nothing is offered where there are several.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from pathlib import Path

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import userfault
from trainckpt.tiers.direct import HUGE_BYTES, PAGE_BYTES, address
from trainckpt.tiers.fresh_memory import is_fresh, is_made, pages

STEP_BYTES = HUGE_BYTES  # of one call, in which the other process cannot lay out its memory anew
NODES = Path("/sys/devices/system/node/online")

# What could not be taken back stays allocated: whoever got it from the allocator would be ended.
_lost: list[memoryview] = []


class Offered:
    """Memory that others may fill; used by any threads."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(userfault.filling())
        self._there: dict[int, memoryview] = {}  # by where it lies
        self._back: set[int] = set()  # those that were taken back all at once
        self._num_lost = 0  # bytes
        self._lock = threading.Lock()

    @property
    def descriptor(self) -> int | None:
        """By which others fill it."""
        return userfault.descriptor()

    def offer(self, block: memoryview) -> bool:
        """Whether others may fill its whole pages now: the system can, and nobody touched it."""
        descriptor = self.descriptor
        if descriptor is None or not _is_one_node() or not is_fresh(block):
            return False
        where = address(block) or 0
        begin, end = pages(where, len(block))
        with self._lock:
            if not userfault.charge(descriptor, begin, end - begin):
                return False
            self._there[where] = block
        return True

    def take_back(self, block: memoryview) -> bool:
        """Nobody fills it any more by what was told here; whether somebody has, as its ends show.

        Raises:
            UnusableSnapshot: the system keeps it in that charge, so nobody may touch it.
        """
        where = address(block) or 0
        with self._lock:
            if where in self._there:
                self._take_back([where])
            if where not in self._back:
                return False
            self._back.discard(where)
        begin, end = pages(where, len(block))
        return is_made(begin) is True and is_made(end - PAGE_BYTES) is True

    def close(self) -> None:
        """Take all back; errors as `take_back`, of what that could not have too. It still tells
        what was filled.
        """
        with self._lock, self._stack:
            self._take_back(list(self._there))

    def _take_back(self, wheres: list[int]) -> None:
        for where in wheres:
            block = self._there.pop(where)
            begin, end = pages(where, len(block))
            descriptor = self.descriptor
            if descriptor is not None and userfault.discharge(descriptor, begin, end - begin):
                self._back.add(where)
            else:
                _lost.append(block)
                self._num_lost += end - begin
        if self._num_lost:
            raise UnusableSnapshot(f"{self._num_lost} bytes of memory cannot be filled")


class Filler:
    """Fills what another process offers; used by any threads.

    Raises:
        OSError: there is no such process, or what it offers cannot be had.
    """

    def __init__(self, process: int, descriptor: int) -> None:
        self._descriptor: int | None = userfault.borrow(process, descriptor)

    def fill(self, where: int, data: memoryview) -> bool:
        """Make the whole pages of what lies at `where` there, with what of `data` belongs to them.

        Whether all were made: none are where a page is, or where the other process has nothing in
        its userfaultfd's charge.
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


@functools.cache
def _is_one_node() -> bool:
    try:
        return NODES.read_text(encoding="ascii").strip().isdigit()
    except OSError:
        return True
