"""Copying: while this rank reads its share, a thread takes what others have read, and hands on its
own.

So the copies are made while the disk is still read. What is not taken when all have read, is then.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot.board import OtherBoard, name_of
from trainckpt.snapshot.handing import Handing
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import other_memory
from trainckpt.tiers.handed_memory import Offered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainckpt.snapshot.blocks import Load
    from trainckpt.snapshot.board import Board

_LOOK_S = 0.002  # at least, between two looks at boards where nothing new stands
_REST = 20  # times as long as a look took, so that many ranks do not keep the cores busy with it


class Copying:
    """Has loads from where other ranks say that they lie, as soon as they say so.

    Attributes:
        taker: Takes what is left, when it has ended.
        offers: Whether others may have filled in something.

    Args:
        loads: That others read.
        boards: Of those others.
        there: Loads that others bring to memory which this process has too: those are verified.
        board: Where this rank asks others to fill in what they read, and says what it has read;
            None: neither.
    """

    def __init__(
        self,
        loads: Iterable[Load],
        boards: Sequence[other_memory.Place],
        there: Iterable[Load] = (),
        board: Board | None = None,
    ) -> None:
        self._there = {name_of(load): load for load in there}
        asked = {name_of(load): load for load in loads}
        self._wanted = asked | self._there
        self._boards = [OtherBoard(place) for place in boards]
        self._taken: list[Load] = []
        self._offered = Offered()
        self.taker = Taker(self._offered)
        self._handing = None if board is None else Handing(board, self._boards)
        self.offers = board is not None and self._ask(board, asked.values())
        self._awake, self._stopped, self._all_read = threading.Event(), False, board is None
        self._thread = threading.Thread(target=self._run, name="trainckpt-take", daemon=True)
        with suppress(RuntimeError):  # no thread: all of it is taken at the end
            self._thread.start()

    def read(self, load: Load) -> None:
        """This rank has read and verified one that others may want; on any thread."""
        assert self._handing is not None
        self._handing.add(load)
        self._awake.set()

    def all_read(self) -> None:
        """This rank has read all that it reads: hand on what was not yet, on this thread too."""
        self._hand()
        self._all_read = True

    def end(self) -> list[Load]:
        """Take and hand on no more; what was taken, and verified. What was not may be half there.

        Raises:
            UnusableSnapshot: memory that was offered cannot be touched any more.
        """
        self._stopped = True
        self._awake.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
            if self._handing is not None:
                self._handing.close()
        finally:
            self._offered.close()
        return self._taken

    def _ask(self, board: Board, loads: Iterable[Load]) -> bool:
        offered = [load for load in loads if load.into and self._offered.offer(load.into)]
        descriptor = self._offered.descriptor
        if offered and descriptor is not None:
            board.ask(descriptor, offered)
        return bool(offered)

    def _run(self) -> None:
        while not self._stopped and (self._wanted or not self._all_read):
            began_s = time.monotonic()
            is_new = self._hand()
            news = [self._look(board) for board in self._boards]
            if not is_new and not any(news):
                looked_s = time.monotonic() - began_s
                self._awake.wait(max(_LOOK_S, _REST * looked_s))
                self._awake.clear()

    def _hand(self) -> bool:
        return self._handing is not None and self._handing.hand()

    def _look(self, board: OtherBoard) -> bool:
        """Whether anything was new on a board."""
        is_new = False
        for name, where in board.news():
            is_new = True
            self._hand()  # while it still lies in a cache
            load = self._wanted.pop(name, None)
            if load is None or self._stopped:
                continue
            assert load.into is not None
            with suppress(OSError, UnusableSnapshot):
                if name in self._there:
                    load.take(load.into)
                else:
                    place = other_memory.Place(board.process, where, len(load.into))
                    self.taker.take(load, place)
                self._taken.append(load)
        return is_new
