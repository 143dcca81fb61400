"""Account for a run's wall time: the records of its attempts, in buckets that add up to it.

`account` is a pure function. Each attempt's time comes from its record (`format/attempt_times.py`),
or, if it was killed, from what the next attempt found of it. `read_account` adds what is known of
an attempt that lives, or was killed last.

    bucket                                    of ml-goodput-measurement
    training                                  goodput: the rest of an attempt's time
    training_prep                             TRAINING_PREP: launch to first boundary
    unproductive_checkpoint_restore_time      ... its part that reads and applies the snapshot
    unproductive_checkpoint_save_time         training waits for a save
    wasted_progress_from_disruption           training that a later resume repeated, or gave up
    infrastructure_recovery_from_disruption   the gaps between attempts
    other                                     attempts of which only the duration is known
    evaluation, leaving                       custom events there

Training is wasted if it does not lead to the newest attempt: what an attempt trained after the
snapshot from which a later one began. Until a later one has begun, nothing is.

Attempts may overlap, if one goes on unnoticed. Then the older one counts until the newer was
claimed, and the newer from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.time_keeper import times_left
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_record import UNDECIDED
from trainckpt.format.attempt_times import (
    NOTHING,
    TIMES,
    AttemptTimes,
    TrainedCount,
    seconds_of,
)
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.attempt_times import CommitMark
    from trainckpt.storage.base import RunTier

TRAINING = "training"
PREPARATION = "training_prep"
RESTORE = "unproductive_checkpoint_restore_time"
SAVE = "unproductive_checkpoint_save_time"
EVALUATION = "evaluation"
WASTED = "wasted_progress_from_disruption"
LEAVING = "leaving"
GAP = "infrastructure_recovery_from_disruption"
OTHER = "other"
BUCKETS = (TRAINING, PREPARATION, RESTORE, SAVE, EVALUATION, WASTED, LEAVING, GAP, OTHER)
_CUSTOM = (EVALUATION, LEAVING)

BEFORE = "before"  # fact of a record: times of the attempt before, which did not record its end
REPEATS = "repeats"  # fact of a record: training of earlier attempts that this one repeats


def name_in_ml_goodput(bucket: str) -> str:
    """Return the bucket's name in ml-goodput-measurement."""
    if bucket == TRAINING:
        return "TOTAL"
    return f"CUSTOM_BADPUT_EVENTS.{bucket.upper()}" if bucket in _CUSTOM else bucket.upper()


@dataclass(frozen=True)
class AttemptAccount:
    """Account of one attempt's time, in buckets.

    Attributes:
        attempt: Its number.
        began, ended: By the wall clock; the part of its life that counts.
        buckets: Bucket -> seconds, with the gap before the attempt.
        restore_s: Tier -> seconds of `RESTORE`, divided by the bytes read from each.
        begun, reached: What was trained where it began, and at its last boundary.
        repeated: What of that was given up or repeated by a later attempt.
        is_over: It has recorded its end, or another one has begun.
    """

    attempt: int
    began: float
    ended: float
    buckets: Mapping[str, float]
    restore_s: Mapping[str, float] = field(default_factory=dict)
    begun: TrainedCount = NOTHING
    reached: TrainedCount = NOTHING
    repeated: TrainedCount = NOTHING
    is_over: bool = True


@dataclass(frozen=True)
class RunAccount:
    """Account of a run's time: of all its attempts.

    Attributes:
        attempts: Oldest first.
    """

    attempts: tuple[AttemptAccount, ...] = ()

    @property
    def buckets(self) -> dict[str, float]:
        """Return bucket -> seconds; they add up to `wall_s`."""
        return {
            name: sum(each.buckets.get(name, 0.0) for each in self.attempts) for name in BUCKETS
        }

    @property
    def restore_s(self) -> dict[str, float]:
        """Return tier -> seconds of restoring."""
        totals: dict[str, float] = {}
        for each in self.attempts:
            for tier, seconds in each.restore_s.items():
                totals[tier] = totals.get(tier, 0.0) + seconds
        return totals

    @property
    def wall_s(self) -> float:
        """Return the seconds from the first launch to the last known moment."""
        return self.attempts[-1].ended - self.attempts[0].began if self.attempts else 0.0

    @property
    def repeated(self) -> TrainedCount:
        """Return the training that later attempts repeated or gave up."""
        return TrainedCount(
            sum(each.repeated.micro_batches for each in self.attempts),
            sum(each.repeated.steps for each in self.attempts),
        )

    @property
    def goodput(self) -> float | None:
        """Return the share of training in the wall time; None without any time."""
        return self.buckets[TRAINING] / self.wall_s if self.wall_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return the account as the command line's JSON has it."""
        return {
            "wall_s": round(self.wall_s, 3),
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "buckets": _rounded(self.buckets),
            "restore_s": _rounded(self.restore_s),
            "repeated_steps": self.repeated.steps,
            "repeated_micro_batches": self.repeated.micro_batches,
        }


def account(
    records: Mapping[int, AttemptRecord], known: Mapping[int, AttemptTimes] | None = None
) -> RunAccount:
    """Return where the time of these attempts went. Pure.

    Args:
        records: Number -> record.
        known: Number -> newer times than those of the record, as of a live attempt.
    """
    times = {**_recorded(records), **{n: own for n, own in (known or {}).items() if n in records}}
    durations = {n: own for n, own in _durations(records).items() if n not in times}
    kept = _kept(records, times)
    counted = sorted({*times, *durations})
    accounts: list[AttemptAccount] = []
    until: float | None = None
    for number, later in zip(counted, [*counted[1:], None], strict=False):
        own = times.get(number) or durations[number]
        claimed = None if later is None else seconds_of(records[later].facts.get("started"))
        ended = own.began + own.seconds
        if claimed is not None:
            ended = max(min(ended, claimed), own.began)
        began = own.began if until is None else max(own.began, until)
        ended = max(ended, began)
        gap_s = 0.0 if until is None else began - until
        buckets = _divide(own, began, ended) if number in times else {OTHER: ended - began}
        part = AttemptAccount(
            attempt=number,
            began=began,
            ended=ended,
            buckets={**dict.fromkeys(BUCKETS, 0.0), **buckets, GAP: gap_s},
            restore_s=_by_tier(own, buckets.get(RESTORE, 0.0)),
            begun=own.begun,
            reached=own.reached,
            is_over=later is not None or records[number].outcome is not None,
        )
        accounts.append(_give_up(part, own.committed, kept[number]) if number in kept else part)
        until = ended
    return RunAccount(tuple(accounts))


def read_account(tier: RunTier) -> RunAccount:
    """Return the account of a run, with what its live or last attempt has come to.

    Raises:
        TierUnavailable: the tier refused.
    """
    records = attempt_history.read_attempts(tier)
    last = records.get(max(records, default=0))
    times = times_left(tier, last) if last is not None and last.outcome is None else None
    return account(records, {last.attempt: times} if last is not None and times else {})


def before_fact(tier: RunTier, before: Mapping[int, AttemptRecord]) -> dict[str, Any]:
    """Return the fact by which an attempt records what is left of the one before it, if any."""
    last = before.get(max(before, default=0))
    if last is None:
        return {}
    try:
        times = times_left(tier, last)
    except TrainckptError:
        return {}
    recorded = AttemptTimes.parse(last.facts.get(TIMES))
    # As in JSON: the page in memory has digits that no record has.
    if times is None or (recorded is not None and times.to_json() == recorded.to_json()):
        return {}  # its own record has as much
    return {BEFORE: {"attempt": last.attempt, TIMES: times.to_json()}}


def repeats_fact(
    before: Mapping[int, AttemptRecord], own: AttemptRecord, begun: TrainedCount
) -> dict[str, Any]:
    """Return the fact by which an attempt records the training that it repeats, if any. Pure.

    Args:
        before: The records of all attempts before.
        own: Its record, with its parent.
        begun: What was trained where it begins.
    """
    times = AttemptTimes.parse(own.facts.get(TIMES))
    if times is None:
        return {}
    known = {own.attempt: replace(times, begun=begun, reached=begun)}
    # Its claim cuts off an older attempt that goes on; that is no training repeated.
    undecided = own.with_(parent=UNDECIDED)
    earlier = account({**before, own.attempt: undecided}, known)
    now = account({**before, own.attempt: own}, known)
    steps = now.repeated.steps - earlier.repeated.steps
    micro_batches = now.repeated.micro_batches - earlier.repeated.micro_batches
    seconds = now.buckets[WASTED] - earlier.buckets[WASTED]
    if not (steps or micro_batches or seconds > 0):
        return {}
    trained = {"steps": steps, "micro_batches": micro_batches}
    return {REPEATS: {**trained, "seconds": round(seconds, 3)}}


def _recorded(records: Mapping[int, AttemptRecord]) -> dict[int, AttemptTimes]:
    """Return the times in each attempt's own record, or those that a later one has found."""
    found: dict[int, AttemptTimes] = {}
    for number, record in records.items():
        own = AttemptTimes.parse(record.facts.get(TIMES))
        if own is not None:
            found[number] = own
    for _, record in sorted(records.items()):
        fact = record.facts.get(BEFORE)
        if not isinstance(fact, dict):
            continue
        before, times = fact.get("attempt"), AttemptTimes.parse(fact.get(TIMES))
        if type(before) is not int or before not in records or times is None:
            continue
        if before not in found or found[before].seconds < times.seconds:
            found[before] = times
    return found


def _durations(records: Mapping[int, AttemptRecord]) -> dict[int, AttemptTimes]:
    """Return beginning and duration of each attempt, as records of older releases have them."""
    found = {}
    for number, record in records.items():
        seconds = (record.outcome or {}).get("seconds")
        body = {"began": record.facts.get("started"), "seconds": seconds or 0.0}
        times = AttemptTimes.parse(body)
        if times is not None:
            found[number] = times
    return found


def _kept(
    records: Mapping[int, AttemptRecord], times: Mapping[int, AttemptTimes]
) -> dict[int, TrainedCount]:
    """Return attempt -> how far its training is on the way to the newest attempt.

    Attempts after the newest that has chosen its snapshot have given nothing up. Nor is anything
    known of those before an attempt without times.
    """
    number = max(
        (n for n, each in records.items() if each.parent != UNDECIDED and n in times), default=0
    )
    kept = {n: own.begun for n, own in times.items() if n < number}
    while number in times and (parent := _parent(records[number])):
        if parent >= number or parent not in times:
            return {n: trained for n, trained in kept.items() if n > parent}
        kept[parent] = times[number].begun
        number = parent
    return kept


def _parent(record: AttemptRecord) -> int:
    """Return the attempt that saved the snapshot or dump that this one began from; 0: none."""
    spelled = record.parent or ""
    name = SnapshotName.parse(spelled) or DumpName.parse(spelled)
    return name.attempt if name is not None else 0


def _divide(times: AttemptTimes, began: float, ended: float) -> dict[str, float]:
    """Return the attempt's buckets between two moments of its life."""
    first_s, last_s = began - times.began, ended - times.began
    trains_s = last_s if times.trains_at is None else min(times.trains_at, last_s)
    leaves_s = last_s if times.leaves_at is None else min(times.leaves_at, last_s)
    if times.trains_at is None:  # it left before it trained
        trains_s = leaves_s
    before_s = max(trains_s - first_s, 0.0)
    between_s = max(leaves_s - max(trains_s, first_s), 0.0)
    restore_s, save_s = min(times.restore_s, before_s), min(times.save_s, between_s)
    evaluation_s = min(times.evaluation_s, between_s - save_s)
    return {
        PREPARATION: before_s - restore_s,
        RESTORE: restore_s,
        SAVE: save_s,
        EVALUATION: evaluation_s,
        TRAINING: between_s - save_s - evaluation_s,
        LEAVING: max(last_s - max(leaves_s, first_s), 0.0),
    }


def _by_tier(times: AttemptTimes, restore_s: float) -> dict[str, float]:
    total_bytes = sum(times.restored_bytes.values())
    read = times.restored_bytes.items() if total_bytes else ()
    return {tier: restore_s * num_bytes / total_bytes for tier, num_bytes in read if num_bytes}


def _give_up(part: AttemptAccount, mark: CommitMark | None, kept: TrainedCount) -> AttemptAccount:
    """Return the account with the training after `kept` moved to the wasted."""
    begun, reached, buckets = part.begun, part.reached, dict(part.buckets)
    kept = min(max(kept, begun), reached)
    repeated = TrainedCount(
        reached.micro_batches - kept.micro_batches, max(reached.steps - kept.steps, 0)
    )
    trained_s = buckets[TRAINING]
    if reached > begun and kept == reached and buckets[LEAVING]:
        wasted_s = 0.0  # it ended at that very boundary
    elif mark is not None and mark.at == kept:
        wasted_s = max(trained_s - mark.training_s, 0.0)
    else:
        wasted_s = trained_s * _share(
            begun.micro_batches, reached.micro_batches, kept.micro_batches
        )
    buckets[TRAINING], buckets[WASTED] = trained_s - wasted_s, wasted_s
    return replace(part, buckets=buckets, repeated=repeated)


def _share(begun: int, reached: int, kept: int) -> float:
    """Return the part of the training from `begun` to `reached` that lies after `kept`."""
    return 1.0 if reached <= begun else (reached - kept) / (reached - begun)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in values.items()}
