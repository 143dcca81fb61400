"""Closed forms: the interval of each level of checkpoints, and the time that a run loses.

A level is a place whose snapshots survive some failures: memory of the host, memory of a partner,
a shared store. A failure is counted at the nearest level that survives it.

    one level       Young, "A first order approximation to the optimum checkpoint interval", CACM
                    17(9), 1974: the interval is the square root of twice the cost of a save times
                    the mean time between failures
    more exactly    Daly, "A higher order estimate of the optimum checkpoint interval for restart
                    dumps", FGCS 22, 2006: its series, and the expected time of a run whose
                    failures are a Poisson process
    many levels     Benoit, Cavelan, Le Fevre, Robert, Sun, "Towards optimal multi-level
                    checkpointing", IEEE Trans. Computers 66(7), 2017: to first order each level has
                    Young's interval for its own cost and its own failures

An interval is the time from the beginning of one save to that of the next, stall included. `plan`
is pure; the saves of `every="auto"`, `trainckpt advise` and the tests of the simulator use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


ROUNDING = 1e-9
MOST_FAILURES = 500.0  # between two saves: such a run never comes through


# ---- one level


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval: `sqrt(2 * stall * MTBF)`."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, his equation 37 plus the stall, since his leaves the save out."""
    ratio = stall_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s + stall_s
    return young_s(stall_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0)


# ---- many levels


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level, as measured or assumed.

    Attributes:
        name: Its.
        stall_s: Training time that a save costs which reaches this level, and with it the nearer
            ones; never less than theirs.
        failures_per_s: Rate of the failures that no nearer level survives, and this one does.
        restore_s: Time to read the state back from it.
        latency_s: From the capture of a save until it can be restored from this level.
        least_s: Shortest possible interval; one save is under way at a time.
        at_s: A fixed interval; None: `plan` chooses.
    """

    name: str
    stall_s: float
    failures_per_s: float
    restore_s: float = 0.0
    latency_s: float = 0.0
    least_s: float = 0.0
    at_s: float | None = None


@dataclass(frozen=True)
class Loss:
    """Expected time lost for each second of training.

    Attributes:
        stall: Waiting for saves.
        rework: Training again what a failure lost, and waiting for copies that it interrupted.
        restore: Reading snapshots.
        downtime: Noticing a failure, replacing hosts, starting processes.
    """

    stall: float
    rework: float
    restore: float
    downtime: float

    @property
    def total(self) -> float:
        """Seconds lost for each second of training."""
        return self.stall + self.rework + self.restore + self.downtime

    @property
    def by_checkpoints(self) -> float:
        """Seconds lost to checkpoints: all but the downtime, which no checkpoint shortens."""
        return self.total - self.downtime

    def of_wall(self, seconds: float) -> float:
        """Return the share of the wall time that these seconds of each second of training are."""
        return seconds / (1.0 + self.total)

    @property
    def ettr(self) -> float:
        """Share of the wall time that is training which is kept (effective training time)."""
        return 1.0 / (1.0 + self.total)


@dataclass(frozen=True)
class IntervalPlan:
    """The intervals, and what they lead to.

    Attributes:
        intervals: Name of a level -> seconds. A level without one is not worth its stalls.
        loss: Expected loss.
    """

    intervals: dict[str, float]
    loss: Loss


def plan(
    levels: Sequence[Level],
    *,
    downtime_s: float = 0.0,
    step_s: float = 0.0,
    most_s: float = math.inf,
) -> IntervalPlan:
    """Choose the interval of each level, and return it with the expected loss.

    A level saves at most as often as each nearer one. Every choice of levels that are used is
    tried (the farthest always is), and the one with the least loss is returned. With one level and
    no bounds the interval is Young's: `plan([Level(name="disk", stall_s=0.5, failures_per_s=1 /
    3600)])` gives 60 s, and a loss of 1.7 %.

    Args:
        levels: Nearest first; one with a fixed interval is always used.
        downtime_s: From a failure until the processes begin to restore.
        step_s: Duration of a step: no interval is shorter.
        most_s: Longest interval, unless a level's shortest is longer.
    """
    plans = [_plan_used(used, downtime_s, step_s, most_s) for used in _choices(levels)]
    least = min(each.loss.total for each in plans) * (1.0 + ROUNDING)
    return next(each for each in plans if each.loss.total <= least)


def _choices(levels: Sequence[Level]) -> Iterator[list[Level]]:
    """Yield each choice of levels with the last one, the most first.

    Failures of a level that is not used go to the next one that is.
    """
    *nearer, last = levels
    optional = [level for level in nearer if level.at_s is None]
    for count in range(len(optional) + 1):
        for unused in combinations(optional, count):
            used: list[Level] = []
            orphaned = 0.0
            for level in (*nearer, last):
                orphaned += level.failures_per_s
                if level not in unused:
                    used.append(replace(level, failures_per_s=orphaned))
                    orphaned = 0.0
            yield used


def _plan_used(
    levels: Sequence[Level], downtime_s: float, step_s: float, most_s: float
) -> IntervalPlan:
    intervals_s = _intervals(levels, step_s, most_s)
    loss = expected_loss(levels, intervals_s, downtime_s=downtime_s)
    names = [level.name for level in levels]
    return IntervalPlan(dict(zip(names, intervals_s, strict=True)), loss)


def _intervals(levels: Sequence[Level], step_s: float, most_s: float) -> list[float]:
    """Return the best interval of each level, none shorter than that of a nearer one.

    Neighbours in the wrong order share one interval: the sum of their losses is again of the form
    `stall / T + failures * T / 2`, whose least value is Young's.
    """
    pools: list[list[Level]] = []
    for level, extra_s in zip(levels, _extra_stalls(levels), strict=True):
        pools.append([replace(level, stall_s=extra_s)])
        while len(pools) > 1 and _best(pools[-2], most_s) >= _best(pools[-1], most_s):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [max(step_s, _best(pool, most_s)) for pool in pools for _ in pool]


def _best(pool: Sequence[Level], most_s: float) -> float:
    """Return the best interval that these levels can share: the chosen one, or Young's."""
    least_s = max(level.least_s for level in pool)
    chosen = [level.at_s for level in pool if level.at_s is not None]
    if chosen:
        return max(least_s, *chosen)
    stall_s = sum(level.stall_s for level in pool)
    failures_per_s = sum(level.failures_per_s for level in pool)
    best_s = young_s(stall_s, 1.0 / failures_per_s) if failures_per_s else math.inf
    return max(least_s, min(best_s, most_s))


def _extra_stalls(levels: Sequence[Level]) -> list[float]:
    """Return what a save to each level costs beside one to the nearer level."""
    nearer_s = [0.0, *(level.stall_s for level in levels[:-1])]
    return [max(0.0, level.stall_s - s) for level, s in zip(levels, nearer_s, strict=True)]


def expected_loss(
    levels: Sequence[Level], intervals_s: Sequence[float], *, downtime_s: float = 0.0
) -> Loss:
    """Return the expected loss at these intervals.

    For one level this is the exact expectation of a Poisson process (Daly, section 3, his restart
    time being downtime, restore and latency together): failures also strike while a run restarts.
    For more it is exact to first order. What the nearer levels lose stretches the time between two
    saves to a farther one, so more of its failures fall into it.
    """
    total, nearer_share = 1.0, 0.0
    first_order = dict.fromkeys(("rework", "restore", "downtime"), 0.0)
    rows = zip(levels, _extra_stalls(levels), intervals_s, strict=True)
    for interval_s, pool in groupby(rows, key=lambda row: row[2]):
        together = list(pool)  # saved at once: one level, whose failures are restored differently
        extra_s = sum(extra_s for _, extra_s, _ in together)
        stretch = total / (1.0 - nearer_share)
        nearer_share += extra_s / interval_s if extra_s else 0.0
        between = again = 0.0  # failures between two saves; seconds of their restarts
        for level, _, _ in together:
            rate = level.failures_per_s
            between += rate * stretch * interval_s if rate else 0.0
            again += rate * (level.latency_s + level.restore_s + downtime_s)
            first_order["restore"] += rate * level.restore_s
            first_order["downtime"] += rate * downtime_s
            first_order["rework"] += rate * level.latency_s
        if nearer_share >= 1.0 or between + again > MOST_FAILURES:
            return Loss(math.inf, 0.0, 0.0, 0.0)
        redone = math.expm1(between) / between if between else 1.0
        first_order["rework"] += redone - 1.0
        total *= redone * math.exp(again)
    stalled = 1.0 / (1.0 - nearer_share)
    total *= stalled
    by_failures = sum(first_order.values())
    scale = (total - stalled) / by_failures if by_failures else 0.0
    parts = {name: value * scale for name, value in first_order.items()}
    return Loss(stall=stalled - 1.0, **parts)
