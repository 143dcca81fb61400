"""Hold the main thread at a boundary while a round is undecided: one lock, one count, the open
rounds.

After a rank has published `passed` for a round it passes no other boundary until that round is
decided, and then acts at its first boundary with passed + 1 > bound:

    main      at_boundary -> None            go on: the boundary is passed
                          -> save            snapshot, close_round, at_boundary again
                          -> stop            quiesce, snapshot, leave; the boundary is not passed.
                                             Or forget_stop, on all ranks, and at_boundary again
    watcher   open_round (before it publishes), decided (after it has read the decision)

The lock is held from the last check of the open rounds to `passed += 1`; a count raised outside it
deadlocks or splits the ranks. Main has no timer of its own: with timers of their own the ranks
would split. Only the watcher ends a wait: by a decision, `broken`, or `finish`.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.ranks.decision import strictest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.notice import Mode
    from trainckpt.ranks.decision import Decision


@dataclass
class _OpenRound:
    opened_at_s: float
    passed: int
    decision: Decision | None = None


class BoundaryGate:
    """Count boundaries and hold them up while a round is undecided.

    Threads: `at_boundary` and `close_round` from the main thread; the rest from any.

    Attributes:
        passed: Boundaries passed since the attempt began. Written under the lock only.
        finished: True if later decisions are ignored.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.passed = 0
        self.finished = False
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[int, _OpenRound] = {}
        self._skipped: list[Decision] = []
        self._first_stop: int | None = None
        self._forgotten = 0  # stops up to this round are undone
        self._stop_mode: Mode | None = None  # of all decided stops: a later one never loosens it
        self._broken: NoAgreement | None = None

    def at_boundary(self, *, resumable: bool = True, window_end: bool = True) -> Decision | None:
        """Pass this boundary, or return the decision due at it. Blocks while a round is undecided.

        Args:
            resumable: True if a resume from here is possible. It must be a function of the cursor,
                the same on all ranks: an action due at a boundary that is not resumable waits for
                the next one that is.
            window_end: True if a window ends here; a stop in mode "window" is due only at such a
                boundary.

        Returns:
            None: the boundary is passed (or `finish` was called: then nothing is counted).
            A save: take it, call `close_round(due.round)`, then `at_boundary` again.
            A stop: leave. It stays due. Its notice has the strictest mode of all stops decided,
            and the seconds now left.

        Raises:
            NoAgreement: no decision can come any more, or the decision was a failed stop.
        """
        with self._lock:
            if self._open or self.finished:
                return self._pass_or_act(resumable, window_end)
            self.passed += 1
            return None

    def close_round(self, round_: int) -> None:
        """Close a round after its save was taken."""
        with self._lock:
            self._open.pop(round_, None)

    def forget_stop(self, round_: int) -> None:
        """Undo the stops up to this round, known to this rank or not.

        All ranks call it at one boundary with one round: a rank may have acted on an older stop of
        them than others, and may hear of the newer one only now.
        """
        with self._lock:
            self._forgotten = max(self._forgotten, round_)
            for number, entry in list(self._open.items()):
                if entry.decision is not None and self._is_forgotten(entry.decision):
                    del self._open[number]
            decisions = [entry.decision for entry in self._open.values() if entry.decision]
            stops = [decision for decision in decisions if decision.stops]
            self._first_stop, self._stop_mode = None, None
            for stop in stops:
                self._know(stop)

    def skipped(self) -> list[Decision]:
        """Return the saves since the last call that all ranks skipped, or that a stop made moot."""
        with self._lock:
            skipped, self._skipped = self._skipped, []
            return skipped

    def has_skipped(self) -> bool:
        """Return True if `skipped` has entries; cheap enough for every boundary."""
        return bool(self._skipped)

    def has_open_round(self) -> bool:
        """Return True if a round waits to be decided or acted on."""
        return bool(self._open)

    def has_save_to_come(self) -> bool:
        """Return True if a decided save has still to be taken by this rank."""
        with self._lock:
            decisions = [entry.decision for entry in self._open.values() if entry.decision]
            return any(not d.stops and not d.failed for d in decisions)

    def open_round(self, round_: int) -> int:
        """Hold main at its next boundary until this round is decided. Return the count to
        publish."""
        with self._lock:
            if not self.finished:
                self._open.setdefault(round_, _OpenRound(self._clock(), self.passed))
            return self.passed

    def decided(self, decision: Decision) -> None:
        """Accept the decision of a round this rank has opened. Repeated: the first stands."""
        with self._lock:
            entry = self._open.get(decision.round)
            if self.finished or entry is None or entry.decision is not None:
                return
            if self._is_forgotten(decision):
                del self._open[decision.round]
                self._changed.notify_all()
                return
            entry.decision = decision
            if decision.stops:
                self._know(decision)
                if decision.failed:
                    self._broken = NoAgreement(f"the ranks could not stop: {decision.why}")
            self._changed.notify_all()

    def broken(self, error: NoAgreement) -> None:
        """Mark all decisions as impossible. Main goes on, unless it waits for one, now or later."""
        with self._lock:
            self._broken = self._broken or error
            self._changed.notify_all()

    def finish(self) -> int:
        """End counting: the attempt is over, or this rank leaves it. Return the final count; may
        repeat."""
        with self._lock:
            self.finished = True
            self._open.clear()
            self._changed.notify_all()
            return self.passed

    def _is_forgotten(self, decision: Decision) -> bool:
        return decision.stops and decision.round <= self._forgotten

    def _know(self, stop: Decision) -> None:
        self._first_stop = min(self._first_stop or stop.round, stop.round)
        self._stop_mode = strictest(self._stop_mode, stop.notice.mode)

    def _pass_or_act(self, resumable: bool, window_end: bool) -> Decision | None:
        self._changed.wait_for(self._may_look)
        if self.finished:
            return None
        if self._broken is not None and self._cannot_go_on():
            raise self._broken
        self._close_moot_rounds()
        due = self._due(window_end) if resumable else None
        if due is None:
            self.passed += 1
        return due

    def _may_look(self) -> bool:
        undecided = any(entry.decision is None for entry in self._open.values())
        return self.finished or self._broken is not None or not undecided

    def _cannot_go_on(self) -> bool:
        decisions = [entry.decision for entry in self._open.values()]
        return any(d is None or (d.failed and d.stops) for d in decisions)

    def _close_moot_rounds(self) -> None:
        """Close saves that failed or come after a stop, and a stop replaced by a newer decided
        one."""
        decisions = [entry.decision for entry in self._open.values() if entry.decision]
        last_stop = max((d.round for d in decisions if d.stops), default=0)
        for decision in decisions:
            if decision.stops and decision.round < last_stop:
                del self._open[decision.round]
            elif not decision.stops and (
                decision.failed or decision.round > (self._first_stop or math.inf)
            ):
                del self._open[decision.round]
                self._skipped.append(decision)

    def _due(self, window_end: bool) -> Decision | None:
        """Return the oldest due save, else the stop if due."""
        saves_first = sorted(self._open, key=lambda k: (self._decision(k).stops, k))
        for round_ in saves_first:
            decision = self._decision(round_)
            anywhere = not decision.stops or self._stop_mode == "micro-batch"
            at_place = anywhere or window_end
            if self.passed + 1 > decision.bound and at_place:
                return self._as_of_now(decision)
        return None

    def _decision(self, round_: int) -> Decision:
        decision = self._open[round_].decision
        assert decision is not None
        return decision

    def _as_of_now(self, decision: Decision) -> Decision:
        notice = decision.notice
        left = notice.seconds_left
        if left is not None:
            left = max(0.0, left - (self._clock() - self._open[decision.round].opened_at_s))
        notice = replace(notice, mode=self._stop_mode or notice.mode, seconds_left=left)
        return replace(decision, notice=notice)
