"""The copy choice: a save is copied at the boundary, or overlapped with what follows. Measured.

Overlap hides the copy behind forward and backward, if there is something left to run it: another
core, or a device that computes. Where there is not, training only becomes slower somewhere else.
So the time from one step to the next is what is looked at: with a save of either kind in it, and
without any.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLAIN, OVERLAP = "plain", "overlap"
NONE = ""  # no save in it
ENOUGH = 2  # saves of a kind before it is judged
LOOK_AGAIN = 64  # saves after which the other kind is tried once more; the first time sooner
FIRST_LOOK = 16
REMEMBERED = 16


def choose(periods_s: Mapping[str, Sequence[float]], number: int) -> str:
    """The kind of the save of this number, from 1: pure.

    Args:
        periods_s: Kind -> seconds from step to step of the last periods of that kind.
        number: Of the save in this attempt. The first makes the arena, and measures nothing.
    """
    plain, overlap = periods_s[PLAIN], periods_s[OVERLAP]
    if number == 1:
        return PLAIN
    if min(len(plain), len(overlap)) < ENOUGH:
        return OVERLAP if len(overlap) <= len(plain) else PLAIN
    better, other = (
        (OVERLAP, PLAIN)
        if statistics.median(overlap) <= statistics.median(plain)
        else (PLAIN, OVERLAP)
    )
    looks_again = number == FIRST_LOOK or number % LOOK_AGAIN == 0
    return other if looks_again else better


class CopyChoice:
    """Measures, and says which kind is next. Training thread."""

    def __init__(self) -> None:
        self._periods_s: dict[str, deque[float]] = {
            kind: deque(maxlen=REMEMBERED) for kind in (NONE, PLAIN, OVERLAP)
        }
        self._last_s: float | None = None
        self._kind: str | None = None  # of the period that runs; None: it measures nothing
        self._saves = 0

    def reach(self, now_s: float) -> None:
        """A step of the first optimizer begins."""
        if self._last_s is not None and self._kind is not None:
            self._periods_s[self._kind].append(now_s - self._last_s)
        self._last_s, self._kind = now_s, NONE

    def disregard(self) -> None:
        """The period that runs measures nothing."""
        self._kind = None

    def next(self) -> str:
        """The kind of the save that is taken now."""
        self._saves += 1
        kind = choose(self._periods_s, self._saves)
        is_first = self._saves == 1 or self._kind != NONE
        self._kind = None if is_first else kind
        return kind
