"""The pace: how long micro-batches and saves take here, measured while training goes on.

`reach` is called at every boundary, so it makes no object and calls no clock of its own.
The training thread writes; any thread reads.
"""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 16


class Pace:
    """Durations of one attempt on this rank."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=REMEMBERED)
        self._saves: deque[float] = deque(maxlen=3)
        self._save_s: float | None = None
        self._stalls: deque[float] = deque(maxlen=5)
        self._copies: deque[float] = deque(maxlen=3)
        self._last_s: float | None = None

    def reach(self, now_s: float) -> None:
        """A boundary is reached."""
        if self._last_s is not None:
            self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s

    def leave(self, now_s: float) -> None:
        """The boundary is left: what was done there is no part of a micro-batch."""
        self._last_s = now_s

    def saved(self, num_bytes: int, seconds: float) -> None:
        """A save of this rank was committed. Saving thread."""
        self._save_s = seconds
        if num_bytes > 0:
            self._saves.append(seconds / num_bytes)

    def stalled(self, seconds: float) -> None:
        """A save was staged, and training waited so long for it."""
        self._stalls.append(seconds)

    def copied(self, num_bytes: int, seconds: float) -> None:
        """So long after a save was begun, all of it was in memory. Saving thread."""
        if num_bytes > 0:
            self._copies.append(seconds / num_bytes)

    def since_s(self, now_s: float) -> float | None:
        """How long ago the last boundary was reached or left; None before the first."""
        return None if self._last_s is None else max(now_s - self._last_s, 0.0)

    @property
    def stall_s(self) -> float | None:
        """Median of what the last saves cost; None before the first."""
        return statistics.median(tuple(self._stalls)) if self._stalls else None

    @property
    def save_s(self) -> float | None:
        """How long the last save took until its commit; None before the first."""
        return self._save_s

    @property
    def micro_batch_s(self) -> float | None:
        """Median of the last micro-batches; None before the second boundary."""
        return statistics.median(tuple(self._durations_s)) if self._durations_s else None

    @property
    def seconds_per_byte(self) -> float | None:
        """Slowest of the last saves; None before the first."""
        return max(tuple(self._saves), default=None)

    @property
    def least_seconds_per_byte(self) -> float | None:
        """Fastest of the last saves; None before the first."""
        return min(tuple(self._saves), default=None)

    @property
    def copy_seconds_per_byte(self) -> float | None:
        """Slowest of the last saves, until all was in memory; None before the first."""
        return max(tuple(self._copies), default=None)
