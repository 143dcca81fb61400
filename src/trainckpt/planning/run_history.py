"""Measure from a run's own past what its saves cost and how often it fails."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.goodput import BEFORE, GAP, PREPARATION, account
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import FINISHED, STOPPED
from trainckpt.format.attempt_times import TIMES, AttemptTimes, count_of
from trainckpt.run_directory.tier_config import TIERS
from trainckpt.storage.redact import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest


PRIOR_S = 24 * 3600.0  # time in which one failure is expected, as long as none was seen
ENOUGH_FAILURES = 3  # to go by them alone


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Measurements of the attempts of a run.

    Attributes:
        world: Ranks of the newest attempt.
        step_s: Mean duration of a step.
        saves: How many the figures are from.
        stall_s: Mean wait of training for a save.
        state_bytes: Of the newest snapshot.
        mtbf_s: Mean time between failures.
        failures: How many were seen.
        restore_s: Mean time to read and apply a snapshot.
        downtime_s: Mean time from a failure to the first boundary, without the restore.
        every_s: Interval in use: mean time from one save to the next.
        tiers: Names of slower tiers.
    """

    world: int
    step_s: float
    saves: int
    stall_s: float
    state_bytes: int
    mtbf_s: float
    failures: int
    restore_s: float = 0.0
    downtime_s: float = 0.0
    every_s: float | None = None
    tiers: tuple[str, ...] = ()


def mean_time_between_failures_s(attempts: Iterable[AttemptRecord]) -> float:
    """Return the mean over this run's ended attempts, with one failure expected in `PRIOR_S`.

    A stop by a notice is no failure: it is saved. The lifetime of an attempt that died without a
    record is unknown, so it counts as a failure and adds no time.
    """
    alive_s, failures = PRIOR_S, 1
    for record in attempts:
        outcome = record.outcome or {}
        failures += _has_failed(record)
        seconds = outcome.get("seconds")
        alive_s += seconds if isinstance(seconds, (int, float)) and seconds > 0 else 0.0
    return alive_s / failures


def _has_failed(record: AttemptRecord) -> bool:
    return (record.outcome or {}).get("outcome") not in (FINISHED, STOPPED)


def measure(
    records: Mapping[int, AttemptRecord], newest: Manifest | None, *, mtbf_s: float | None = None
) -> MeasuredRun:
    """Return what these attempts have measured. Pure.

    Args:
        records: Of all attempts, by number. The newest may be alive: it has not failed.
        newest: Manifest of the newest snapshot.
        mtbf_s: Mean time between failures, if the user gives one.

    Raises:
        ConfigurationError: no attempt has measured a save.
    """
    times = _times(records)
    saves = sum(each.saves for each in times.values())
    steps = sum(each.reached.steps - each.begun.steps for each in times.values())
    training_s = sum(each.training_s for each in times.values())
    if not saves or not steps or not training_s:
        raise ConfigurationError(
            "no attempt of this run has measured a save yet",
            hint="train on until some were taken, or describe the job: --gpus N --state-gb GB",
        )
    failed = [number for number in sorted(records)[:-1] if _has_failed(records[number])]
    last = records[max(records)]
    if last.outcome is not None and _has_failed(last):
        failed.append(max(records))
    stall_s = sum(each.save_s for each in times.values())
    alive_s = sum(each.seconds for each in times.values())
    if mtbf_s is None and len(failed) >= ENOUGH_FAILURES:
        mtbf_s = alive_s / len(failed)
    elif mtbf_s is None:
        mtbf_s = (PRIOR_S + alive_s) / (1 + len(failed))
    restores_s = [each.restore_s for each in times.values() if each.begun.micro_batches]
    return MeasuredRun(
        world=count_of(last.facts.get("world")) or 1,
        step_s=training_s / steps,
        saves=saves,
        stall_s=stall_s / saves,
        state_bytes=0 if newest is None else newest.num_bytes + newest.reached_bytes,
        mtbf_s=mtbf_s,
        failures=len(failed),
        restore_s=statistics.fmean(restores_s) if restores_s else 0.0,
        downtime_s=_downtime_s(records, failed),
        every_s=(training_s + stall_s) / saves,
        tiers=_slower_tiers(last),
    )


def _times(records: Mapping[int, AttemptRecord]) -> dict[int, AttemptTimes]:
    """Return each attempt's times: its own, or what the next attempt found of a killed one."""
    found: dict[int, AttemptTimes] = {}
    for number, record in sorted(records.items()):
        before = record.facts.get(BEFORE)
        if isinstance(before, dict) and before.get("attempt") in found:
            times, own = AttemptTimes.parse(before.get(TIMES)), found[before["attempt"]]
            if times is not None and times.seconds > own.seconds:
                found[before["attempt"]] = times
        own_times = AttemptTimes.parse(record.facts.get(TIMES))
        if own_times is not None:
            found[number] = own_times
    return found


def _downtime_s(records: Mapping[int, AttemptRecord], failed: Iterable[int]) -> float:
    """Return the median time from a failure until the next attempt trains, without its restore.

    Of a run that has not failed it is the start-up alone.
    """
    accounts = {each.attempt: each for each in account(records).attempts}
    next_of = dict(zip(sorted(accounts), sorted(accounts)[1:], strict=False))
    restarts = [accounts[next_of[number]].buckets for number in failed if number in next_of]
    if restarts:
        return statistics.median(each[GAP] + each[PREPARATION] for each in restarts)
    return statistics.median(each.buckets[PREPARATION] for each in accounts.values())


def _slower_tiers(record: AttemptRecord) -> tuple[str, ...]:
    facts = record.facts.get(TIERS)
    names = (
        [tier.get("name") for tier in facts if isinstance(tier, dict)]
        if isinstance(facts, list)
        else []
    )
    return tuple(one_line(name) for name in names if isinstance(name, str) and name != "local")
