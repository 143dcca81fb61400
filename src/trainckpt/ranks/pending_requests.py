"""Keep the requests of this rank for a stop or a save until the ranks have decided on them.

The rules keep repeated notices free and lose no request:

    a stop      opens the next round at once, unless one at least as strict, with no later
                deadline, was requested or decided already; it keeps the strictest mode and the
                earliest deadline of those before it
    a save      waits until no round is undecided, then opens the next one; a stop drops it
      without a number   any save decided after the request will do: merged
      with number n      the n-th `ckpt.save()` of any rank: dropped once a round has decided
                         save n (or a later one), taken or skipped; never merged with another n,
                         because each has its own tag

A request whose round turned out otherwise (its rank's answer came too late) is made again.

Threads: under the watcher's lock only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.ranks.decision import strictest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainckpt.notice import Mode, Notice
    from trainckpt.ranks.decision import Decision


SOONER_S, SOONER_SHARE = 1.0, 0.1  # smaller differences count as the same deadline


class PendingRequests:
    """Notices of one rank that no round has settled.

    Attributes:
        stop_mode: The strictest stop known to this rank, requested or decided; None: none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop_mode: Mode | None = None
        self._deadline_s: float | None = None
        self._clock = clock
        self._stop: Notice | None = None
        self._saves: list[Notice] = []
        self._decided_number = 0
        self._published: dict[int, Notice] = {}

    def add(self, notice: Notice) -> None:
        """Add a notice, its mode filled in, unless a known one covers it."""
        if notice.action == "stop":
            if self._is_stricter(notice):
                self._stop = self._merge(notice)
                self._saves.clear()
        elif self.stop_mode is None and not self._is_covered(notice):
            self._saves.append(notice)

    def next_notice(self, undecided: Collection[int]) -> Notice | None:
        """Return the request to propose now, or to attach to a round another rank opened.

        No save while a round is undecided here: it may be that very save, and ranks that already
        know this would take it twice.
        """
        if self._stop is not None or not undecided:
            return self._stop or next(iter(self._saves), None)
        return None

    def unmet_stop(self) -> bool:
        """Return True if a stop is pending and no round has been opened for it."""
        return self._stop is not None

    def forget_stop(self) -> None:
        """Undo the known stop: a later request is a new one."""
        self.stop_mode = self._deadline_s = None

    def published(self, round_: int, notice: Notice | None) -> None:
        """Record that this rank has published `notice` for `round_`."""
        if notice is not None:
            self._published[round_] = notice
            self._stop = None

    def on_decision(self, decision: Decision, *, is_forgotten: bool = False) -> None:
        """Drop the requests covered by a decided round. A stop of a forgotten round is undone."""
        mine = self._published.pop(decision.round, None)
        if decision.stops and is_forgotten:
            return
        if decision.stops:
            self._saves.clear()
            self._merge(decision.notice)
            return
        if mine is not None and mine.action == "stop":
            self._stop = mine
        self._drop_saves(decision, mine)

    def _drop_saves(self, decision: Decision, mine: Notice | None) -> None:
        numbers = [decision.notice.number or 0]
        if decision.failed and mine is not None:
            numbers.append(mine.number or 0)
        self._decided_number = max(self._decided_number, *numbers)
        self._saves = [save for save in self._saves if (save.number or 0) > self._decided_number]

    def _is_stricter(self, notice: Notice) -> bool:
        if self.stop_mode is None or strictest(self.stop_mode, notice.mode) != self.stop_mode:
            return True
        if notice.seconds_left is None or self._deadline_s is None:
            return notice.seconds_left is not None
        sooner_s = self._deadline_s - self._clock() - notice.seconds_left
        return sooner_s > max(SOONER_S, SOONER_SHARE * notice.seconds_left)

    def _merge(self, stop: Notice) -> Notice:
        """Take a stop into account; returns it with the strictest mode and the least time."""
        now_s = self._clock()
        self.stop_mode = strictest(self.stop_mode, stop.mode)
        if stop.seconds_left is not None:
            own_s = now_s + stop.seconds_left
            self._deadline_s = min(self._deadline_s or own_s, own_s)
        left = None if self._deadline_s is None else max(0.0, self._deadline_s - now_s)
        return replace(stop, mode=self.stop_mode, seconds_left=left)

    def _is_covered(self, notice: Notice) -> bool:
        if notice.number is not None and notice.number <= self._decided_number:
            return True
        return any(save.number == notice.number for save in self._saves)
