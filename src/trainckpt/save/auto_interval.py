"""Choose how often to save for `every="auto"`. Pure.

More frequent saves cost more time, less frequent ones lose more at a failure. The sum is least
where the interval is the square root of twice the cost of a save times the mean time between
failures (Young, "A first order approximation to the optimum checkpoint interval", 1974).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainckpt.format.attempt_record import FINISHED, STOPPED
from trainckpt.replicate.tier_interval import WRITING_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.format.attempt_record import AttemptRecord

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
