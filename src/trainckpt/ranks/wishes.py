"""What this rank wants of the others, and whether that needs a round of its own.

The rules, so that a repeated notice costs nothing and no wish is lost:

    a stop      opens the next round at once, unless one at least as strict, with no later
                deadline, was asked for or decided already; it keeps the strictest mode and the
                earliest deadline of those before it
    a save      waits until no round is undecided, then opens the next one; a stop drops it
      without a number   any save that is decided after it was asked for will do: merged
      with number n      the n-th `ckpt.save()` of any rank: dropped once a round has decided
                         save n (or a later one), taken or skipped; never merged with another n,
                         because each has its own tag

A wish whose round turned out otherwise (its rank's answer came too late) is asked for again.

Threads: under the watcher's lock only. Floor 1. Uses: ranks.decision. Used by: ranks.watcher.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.ranks.decision import Decision, Mode, Wish, strictest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SOONER_S, SOONER_SHARE = 1.0, 0.1  # a deadline that is less earlier than that is the same one


class Wishes:
    """The wishes of one rank that no round has settled.

    Attributes:
        stop_mode: The strictest stop known to this rank, asked for or decided; None: none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop_mode: Mode | None = None
        self._deadline_s: float | None = None
        self._clock = clock
        self._stop: Wish | None = None
        self._saves: list[Wish] = []
        self._settled_number = 0
        self._asked: dict[int, Wish] = {}

    def add(self, wish: Wish) -> None:
        """Remember a wish, unless something known covers it."""
        if wish.action == "stop":
            if self._is_stricter(wish):
                self._stop = self._know(wish)
                self._saves.clear()
        elif self.stop_mode is None and not self._is_covered(wish):
            self._saves.append(wish)

    def to_bring(self, undecided: Collection[int]) -> Wish | None:
        """The wish to open a round for now, or to bring to one that another rank has opened.

        No save while a round is undecided here: it may be that very save, and the ranks that
        know so already would take it twice.
        """
        if self._stop is not None or not undecided:
            return self._stop or next(iter(self._saves), None)
        return None

    def unmet_stop(self) -> bool:
        """Whether a stop is wanted that no round has been opened for."""
        return self._stop is not None

    def forget_stop(self) -> None:
        """The stop that was known is undone: one that is asked for from now on is a new one."""
        self.stop_mode = self._deadline_s = None

    def asked(self, round_: int, wish: Wish | None) -> None:
        """This rank has published `wish` for `round_`."""
        if wish is not None:
            self._asked[round_] = wish
            self._stop = None

    def settle(self, decision: Decision, *, is_forgotten: bool = False) -> None:
        """A round is decided: forget what it covers. A stop of a forgotten round is undone."""
        mine = self._asked.pop(decision.round, None)
        if decision.action == "stop" and is_forgotten:
            return
        if decision.action == "stop":
            self._saves.clear()
            self._know(Wish("", "stop", decision.mode, decision.seconds_left))
            return
        if mine is not None and mine.action == "stop":
            self._stop = mine
        self._settle_saves(decision, mine)

    def _settle_saves(self, decision: Decision, mine: Wish | None) -> None:
        numbers = [decision.number or 0]
        if decision.failed and mine is not None:
            numbers.append(mine.number or 0)
        self._settled_number = max(self._settled_number, *numbers)
        self._saves = [w for w in self._saves if (w.number or 0) > self._settled_number]

    def _is_stricter(self, wish: Wish) -> bool:
        if self.stop_mode is None or strictest(self.stop_mode, wish.mode) != self.stop_mode:
            return True
        if wish.seconds_left is None or self._deadline_s is None:
            return wish.seconds_left is not None
        sooner_s = self._deadline_s - self._clock() - wish.seconds_left
        return sooner_s > max(SOONER_S, SOONER_SHARE * wish.seconds_left)

    def _know(self, stop: Wish) -> Wish:
        """Take a stop into account; returns it with the strictest mode and the least time."""
        now_s = self._clock()
        self.stop_mode = strictest(self.stop_mode or stop.mode, stop.mode)
        if stop.seconds_left is not None:
            own_s = now_s + stop.seconds_left
            self._deadline_s = min(self._deadline_s or own_s, own_s)
        left = None if self._deadline_s is None else max(0.0, self._deadline_s - now_s)
        return replace(stop, mode=self.stop_mode, seconds_left=left)

    def _is_covered(self, wish: Wish) -> bool:
        if wish.number is not None and wish.number <= self._settled_number:
            return True
        return any(save.number == wish.number for save in self._saves)
