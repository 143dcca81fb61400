"""Count durations in fixed buckets, as Prometheus and OpenTelemetry take them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Upper bounds in seconds: from a copy of a small state to a save to slow storage.
BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)


@dataclass(frozen=True)
class HistogramCounts:
    """Durations counted so far.

    Attributes:
        counts: Number in each bucket of `BOUNDS_S`; the last: above all bounds.
        sum_s: Their sum.
    """

    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Return the number of durations."""
        return sum(self.counts)


class DurationHistogram:
    """Durations of one kind. One thread observes, any thread reads."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> HistogramCounts:
        """Return the counts now."""
        return HistogramCounts(tuple(self._counts), self._sum_s)
