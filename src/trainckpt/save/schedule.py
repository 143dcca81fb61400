"""Decide when to save without a request. Pure, or with the time passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.attempt.options import Every


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
