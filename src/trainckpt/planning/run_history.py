"""Estimate from a run's own past how often it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format.attempt_record import FINISHED, STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.format.attempt_record import AttemptRecord


PRIOR_S = 24 * 3600.0  # time in which one failure is expected, as long as none was seen


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
