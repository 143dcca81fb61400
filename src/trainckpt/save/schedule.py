"""Decide when to save without a request. Pure, or with the time passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainckpt.format.attempt_record import FINISHED, STOPPED
from trainckpt.replicate.uploads import WRITING_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainckpt.attempt.options import Every
    from trainckpt.format.attempt_record import AttemptRecord


# ---- the interval of `every="auto"`
#
# More frequent saves cost more time, less frequent ones lose more at a failure. The sum is least
# where the interval is the square root of twice the cost of a save times the mean time between
# failures (Young, "A first order approximation to the optimum checkpoint interval", 1974).


PRIOR_S = 24 * 3600.0  # time in which one failure is expected, as long as none was seen
LEAST_S, MOST_S = 10.0, 3600.0
COST_SHARE = 0.01  # largest share of the time that saves may cost
FIRST_S = 60.0  # until a save was measured


def interval_s(cost_s: float | None, write_s: float | None, mean_s: float) -> float:
    """Return the seconds from one save to the next.

    Args:
        cost_s: Seconds of training lost by one save; None: not measured yet.
        write_s: From its beginning to its commit.
        mean_s: Mean time between failures.
    """
    if cost_s is None:
        return FIRST_S
    best = math.sqrt(2.0 * cost_s * mean_s)
    least = max(LEAST_S, cost_s / COST_SHARE, (write_s or 0.0) / WRITING_SHARE)
    return max(min(best, MOST_S), least)


def mean_time_between_failures_s(attempts: Iterable[AttemptRecord]) -> float:
    """Return the mean over this run's ended attempts, with one failure expected in `PRIOR_S`.

    A stop by a notice is no failure: it is saved. The lifetime of an attempt that died without a
    record is unknown, so it counts as a failure and adds no time.
    """
    alive_s, failures = PRIOR_S, 1
    for record in attempts:
        outcome = record.outcome or {}
        if outcome.get("outcome") not in (FINISHED, STOPPED):
            failures += 1
        seconds = outcome.get("seconds")
        alive_s += seconds if isinstance(seconds, (int, float)) and seconds > 0 else 0.0
    return alive_s / failures


# ---- the schedule


class SaveSchedule:
    """Decides about saves by steps (the same on all ranks) and by time (asked by rank 0).

    `every="100 steps"` is a pure function of the cursor, so every rank finds it due at the same
    boundary. `every="10 min"` is not: one rank asks, and all agree on the boundary.
    `every="auto"` is by time, and each interval follows from what was measured before it.
    """

    def __init__(
        self,
        every: Every,
        begun_step: int,
        now_s: float,
        interval: Callable[[], float] = lambda: 0.0,
        memory_every: Every | None = None,
    ) -> None:
        """`interval` returns the next one, in seconds, where `every` is "auto".

        `memory_every` is by steps: saves to memory, where none to the run directory is due.
        """
        self._memory = SaveSchedule(memory_every, begun_step, now_s) if memory_every else None
        self._in_memory = False
        self._steps = every.steps
        self._interval = interval if every.auto else None
        self._seconds = interval() if every.auto else every.seconds
        self.reason = f"every {every.text}"
        self._multiple = begun_step // self._steps if self._steps else 0
        self._next_s = now_s + self._seconds if self._seconds else float("inf")

    @property
    def save_arguments(self) -> dict[str, bool]:
        """Arguments for the save that `due_by_steps` has just reported due."""
        return {"may_skip": True, "in_memory": self._in_memory}

    def due_by_steps(self, step: int, micro: int) -> bool:
        """True once, at the first window's start at or beyond each multiple."""
        in_memory = self._memory is not None and self._memory.due_by_steps(step, micro)
        due = self._is_due(step, micro)
        self._in_memory = in_memory and not due
        return due or in_memory

    def _is_due(self, step: int, micro: int) -> bool:
        if self._steps is None or micro:
            return False
        multiple = step // self._steps
        if multiple <= self._multiple:
            return False
        self._multiple = multiple
        return True

    def due_by_time(self, now_s: float) -> bool:
        """True once each time the interval has passed."""
        if now_s < self._next_s or self._seconds is None:
            return False
        if self._interval is not None:
            self._seconds = self._interval()
        self._next_s = now_s + self._seconds
        return True
