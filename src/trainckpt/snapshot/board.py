"""Board: while ranks of a host read their shares, each says what is there, and takes what is.

    Board    entries of sixteen bytes in the memory of the rank that has read it: which run of
             blocks, and where it lies; zero: nothing yet
    Copying  a thread that looks at the others' boards, and copies and verifies what it finds

So the copies are made while the disk is still read. What is not taken when all have read, is then.
Boards are written by one process and only read by others; whatever stands there, what is copied
is verified.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import other_memory
from trainckpt.tiers.direct import address, memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainckpt.snapshot.blocks import Load

NUM_ENTRIES = 1 << 16  # what is read beyond that is not said; pages are made as it is
_ENTRY_BYTES = 16
_LOOK_S = 0.002  # at least, between two looks at boards where nothing new stands
_REST = 20  # times as long as a look took, so that many ranks do not keep the cores busy with it


class Board:
    """What this rank has read. Written by any thread, read by other processes."""

    def __init__(self) -> None:
        self._memory = memory(NUM_ENTRIES * _ENTRY_BYTES)
        self._numbers = self._memory.cast("Q")
        self._used, self._lock = 0, threading.Lock()

    @property
    def place(self) -> other_memory.Place:
        """Where others find it."""
        return other_memory.place_of(self._memory)

    def say(self, load: Load) -> None:
        """A load lies verified where it belongs; it is one that has memory of its own."""
        assert load.into is not None
        where, name = address(load.into), _name(load)
        with self._lock:
            if where is None or self._used == NUM_ENTRIES:
                return
            at = 2 * self._used
            self._numbers[at + 1] = name
            self._numbers[at] = where  # the last of it: before, there is none
            self._used += 1


class Copying:
    """Copies loads from where other ranks say that they lie, as soon as they say so.

    Args:
        loads: That others read.
        boards: Of those others.
        there: Loads that others bring to memory which this process has too: those are verified.
    """

    def __init__(
        self,
        loads: Iterable[Load],
        boards: Sequence[other_memory.Place],
        there: Iterable[Load] = (),
    ) -> None:
        self._there = {_name(load): load for load in there}
        self._wanted = {_name(load): load for load in loads} | self._there
        self._boards = [_Board(place) for place in boards]
        self._taken: list[Load] = []
        self._taker = Taker()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainckpt-take", daemon=True)
        with suppress(RuntimeError):  # no thread: all of it is taken at the end
            self._thread.start()

    def end(self) -> list[Load]:
        """Take no more; what was taken, and verified. What was not may be half there."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        return self._taken

    def _run(self) -> None:
        while self._wanted and not self._stop.is_set():
            began_s = time.monotonic()
            news = [self._look(board) for board in self._boards]
            if not any(news):
                looked_s = time.monotonic() - began_s
                self._stop.wait(max(_LOOK_S, _REST * looked_s))

    def _look(self, board: _Board) -> bool:
        """Whether anything was new on a board."""
        is_new = False
        for name, where in board.news():
            is_new = True
            load = self._wanted.pop(name, None)
            if load is None or self._stop.is_set():
                continue
            assert load.into is not None
            with suppress(OSError, UnusableSnapshot):
                if name in self._there:
                    load.take(load.into)
                else:
                    place = other_memory.Place(board.process, where, len(load.into))
                    self._taker.take(load, place)
                self._taken.append(load)
        return is_new


class _Board:
    """That of another rank."""

    _AT_ONCE = 256  # entries

    def __init__(self, place: other_memory.Place) -> None:
        self._place, self._read = place, 0
        self.process = place.process

    def news(self) -> list[tuple[int, int]]:
        """Name and address of what was said since the last time."""
        first = self._read * _ENTRY_BYTES
        size = min(self._AT_ONCE * _ENTRY_BYTES, self._place.num_bytes - first)
        if size <= 0:
            return []
        found = memoryview(bytearray(size))
        try:
            where = self._place.address + first
            other_memory.read(other_memory.Place(self.process, where, size), found)
        except OSError:
            return []
        numbers = found.cast("Q")
        news: list[tuple[int, int]] = []
        for at in range(0, len(numbers), 2):
            if not numbers[at]:
                break
            news.append((numbers[at + 1], numbers[at]))
        self._read += len(news)
        return news


def _name(load: Load) -> int:
    """The same on every rank for the same bytes of the same file."""
    assert load.into is not None
    text = f"{load.place.key}\n{load.first_byte}\n{len(load.into)}"
    return int(digest.digest(text.encode())[:16], 16)
