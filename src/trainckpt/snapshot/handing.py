"""Handing: what a rank has read it fills into the memory of the ranks of its host that ask for it.

    every rank   offers its memory for what others read, and says where that lies (`Board.ask`)
    whoever has  fills it in there, while it still lies in a cache, then says on its own board that
    read it      it is there: who did not get it copies it

Nothing depends on it, and whoever got something verifies it.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.snapshot.board import name_of
from trainckpt.tiers.handed_memory import Filler

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainckpt.snapshot.blocks import Load
    from trainckpt.snapshot.board import Board, OtherBoard


class Handing:
    """Hands on what this rank has read; used by any threads.

    Args:
        board: Where it is said then.
        boards: Of the others.
    """

    def __init__(self, board: Board, boards: Iterable[OtherBoard]) -> None:
        self._board = board
        self._silent = list(boards)  # that have not asked yet
        self._asking: list[tuple[Filler, Mapping[int, int]]] = []
        self._looking = threading.Lock()
        self._read: queue.SimpleQueue[Load] = queue.SimpleQueue()

    def add(self, load: Load) -> None:
        """A load lies verified where it belongs."""
        self._read.put(load)

    def hand(self) -> bool:
        """Hand on what was read since, and say that it is there; whether there was anything."""
        self._look()
        is_any = False
        with suppress(queue.Empty):
            while True:
                load = self._read.get_nowait()
                is_any = True
                self._hand(load)
                self._board.say(load)
        return is_any

    def close(self) -> None:
        """Nothing is handed on any more."""
        asking, self._asking, self._silent = self._asking, [], []
        for filler, _ in asking:
            filler.close()

    def _look(self) -> None:
        """Find out who asks by now."""
        with self._looking:
            for board in list(self._silent):
                asked = board.asked()
                if asked is None:
                    continue
                self._silent.remove(board)
                with suppress(OSError):
                    self._asking.append((Filler(board.process, asked.descriptor), asked.where))

    def _hand(self, load: Load) -> None:
        assert load.into is not None
        name = name_of(load)
        for filler, where_of in list(self._asking):
            where = where_of.get(name)
            if where is not None:
                filler.fill(where, load.into)
