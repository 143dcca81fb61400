"""Read the metrics of a live attempt, when they are scraped or written.

Called on the publisher's thread, beside all others: it reads what the attempt's objects hold, and
takes no lock of training. A boundary does nothing for it.

The times of earlier attempts are read once from the run's records. They do not change while this
attempt lives.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.attempt.duration_histogram import HistogramCounts
from trainckpt.attempt.goodput import BUCKETS, TRAINING, account
from trainckpt.attempt.options import LOCAL, PARTNER
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED, UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.metrics import metric_table as table
from trainckpt.metrics.metric_table import ATTEMPT, RUN
from trainckpt.snapshot.attempt_history import read_attempts
from trainckpt.storage.redact import redact_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.attempt.live_status import LiveStatus
    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.metrics.metric_table import Metric
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.estimates import Timings
    from trainckpt.save.schedule import SaveSchedule
    from trainckpt.storage.base import RunTier

READ_TRIES = 5
UNKNOWN = "unknown"  # it left no outcome
ENDS = (STOPPED, FAILED, KILLED, FINISHED, UNKNOWN)  # of the attempt before a resume

Value = float | HistogramCounts


class Reading(NamedTuple):
    """One metric now: a value for each value of its own label."""

    metric: Metric
    values: Sequence[tuple[str, Value]]  # "" without a label of its own


@dataclass(frozen=True)
class _Earlier:
    """Account of the attempts before, by their records."""

    attempt: int  # the one that they are before
    buckets: Mapping[str, float]
    resumes: Mapping[str, int]


class RunReadings:
    """Metrics of one attempt. Rank 0.

    Attributes:
        is_over: The attempt has ended: the next readings are its last.
        begun_unix_s: The launch, by the wall clock.
    """

    def __init__(
        self,
        *,
        tier: RunTier,
        record_writer: RecordWriter,
        timings: Timings,
        saver: SaveCoordinator,
        schedule: SaveSchedule,
        status: Callable[[], LiveStatus],
        grace_s: float | None,
        durable: str,
        begun_from: tuple[str, float] | None,
        damaged: Mapping[str, int],
    ) -> None:
        """Store the arguments.

        Args:
            tier, record_writer, timings, saver, schedule: Of the attempt.
            status: Returns what the attempt does now.
            grace_s: Grace period of a signal; None: not stated.
            durable: Name of the durable tier.
            begun_from: Full name of the snapshot that the attempt began from, and when it was
                taken; None: it began at step 0.
            damaged: Tier -> copies that did not pass verification as the attempt began.
        """
        self.is_over = False
        self._tier, self._record_writer = tier, record_writer
        self._timings, self._saver, self._schedule = timings, saver, schedule
        self._status, self._grace_s, self._durable = status, grace_s, durable
        self._begun_from, self._damaged = begun_from, damaged
        self._earlier: _Earlier | None = None
        self._highest_s: dict[str, float] = {}

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of all values."""
        run, attempt = redact_text(self._tier.url), self._record_writer.record.attempt
        # Paths may hold bytes that are no text; labels may not.
        return {RUN: run.encode(errors="backslashreplace").decode(), ATTEMPT: str(attempt)}

    @property
    def begun_unix_s(self) -> float:
        """Return the launch of the attempt."""
        return self._timings.times.times().began

    def read(self) -> list[Reading]:
        """Return every metric that has a value now."""
        for _ in range(READ_TRIES - 1):
            with contextlib.suppress(RuntimeError):  # a container has changed meanwhile
                return self._read()
        return self._read()

    def _read(self) -> list[Reading]:
        status = self._status()
        readings = [*self._progress(status), *self._saves(status), *self._copies(status)]
        with contextlib.suppress(TrainckptError):  # the records are read again next time
            readings += self._times()
        return [reading for reading in readings if reading.values]

    def _progress(self, status: LiveStatus) -> Iterator[Reading]:
        left_s = self._grace_s if status.stop is None else status.stop.seconds_left
        yield _one(table.RUNNING, 0 if self.is_over else 1)
        yield _one(table.PUBLISHED, status.written)
        yield _one(table.STEPS, self._timings.times.times().reached.steps)
        yield _one(table.STEP_S, status.step_s)
        yield _one(table.GRACE, left_s)

    def _saves(self, status: LiveStatus) -> Iterator[Reading]:
        saver, durations = self._saver, self._timings.durations
        yield _one(table.STALL, durations.stall.read())
        yield _one(table.STAGE, durations.stage.read())
        yield _one(table.PERSIST, durations.persist.read())
        yield _one(table.COMMIT, durations.commit.read())
        failed = dict(saver.failed_by_kind)
        yield Reading(table.FAILED, [(kind, failed.get(kind, 0)) for kind in SaveFailed.KINDS])
        yield _one(table.FAILED_IN_A_ROW, saver.failures)
        yield _one(table.SKIPPED, status.skipped)

    def _copies(self, status: LiveStatus) -> Iterator[Reading]:
        uploaders, step_s = self._saver.uploads.uploaders, status.step_s
        reached = self._timings.times.times().reached.steps
        own_s = self._schedule.interval_s(step_s)
        intervals = {
            LOCAL: own_s,
            **{u.tier.name: u.interval_s(own_s, step_s) for u in uploaders},
        }
        newest = {u.tier.name: u.newest or "" for u in uploaders}
        if status.replicates:
            newest[PARTNER] = status.replicated
            intervals[PARTNER] = self._schedule.memory_interval_s(step_s)
        written = {LOCAL: self._saver.written_bytes}
        written |= {u.tier.name: u.written_bytes for u in uploaders}
        damaged = {**dict.fromkeys(written, 0), **self._damaged}
        damaged[LOCAL] += sum(u.damaged for u in uploaders)
        known = [(name, s) for name, s in intervals.items() if s is not None]
        lags = [(name, max(reached - _step_of(full), 0)) for name, full in newest.items()]
        yield Reading(table.WRITTEN, list(written.items()))
        yield Reading(table.INTERVAL, known)
        yield Reading(table.REPLICA_LAG, lags)
        yield Reading(table.FAILED_COPIES, [(u.tier.name, u.failed) for u in uploaders])
        yield Reading(table.VERIFY_FAILURES, list(damaged.items()))
        snapshot, created = self._newest_durable()
        began = self.begun_unix_s
        age_s = max(time.time() - max(created or began, began), 0.0)
        yield Reading(table.DURABLE_STEP, [(self._durable, _step_of(snapshot))])
        yield Reading(table.DURABLE_AGE, [(self._durable, age_s)])

    def _newest_durable(self) -> tuple[str, float | None]:
        """Return the full name of the newest durable snapshot, and when it was taken."""
        for uploader in self._saver.uploads.uploaders:
            if uploader.tier.name == self._durable:
                return uploader.newest or "", uploader.created
        committed = self._saver.committed
        if committed is not None:
            return committed[0], self._saver.created
        return self._begun_from or ("", None)

    def _times(self) -> Iterator[Reading]:
        times, record = self._timings.times.times(), self._record_writer.record
        own = account({record.attempt: record}, {record.attempt: times})
        yield Reading(table.RESTORE, list(own.restore_s.items()))
        earlier = self._earlier
        if earlier is None or earlier.attempt != record.attempt:
            self._earlier = earlier = self._read_earlier(record)
            self._highest_s = dict.fromkeys(BUCKETS, 0.0)
        for name in BUCKETS:
            # A wait for a save counts as training until it is over; but no counter may fall.
            seconds = earlier.buckets[name] + own.buckets[name]
            self._highest_s[name] = max(self._highest_s[name], seconds)
        buckets = dict(self._highest_s)
        yield _one(table.GOODPUT, buckets.pop(TRAINING))
        yield Reading(table.BADPUT, list(buckets.items()))
        yield Reading(table.RESUMES, list(earlier.resumes.items()))

    def _read_earlier(self, record: AttemptRecord) -> _Earlier:
        """Return what the records say, with what this attempt means for those before it."""
        number, times = record.attempt, self._timings.times.times()
        records = read_attempts(self._tier)
        records = {n: each for n, each in records.items() if n < number} | {number: record}
        whole, alone = account(records, {number: times}), account({number: record}, {number: times})
        return _Earlier(
            number,
            {name: whole.buckets[name] - alone.buckets[name] for name in BUCKETS},
            _resumes(records),
        )


def _one(metric: Metric, value: Value | None) -> Reading:
    return Reading(metric, [] if value is None else [("", value)])


def _step_of(snapshot: str) -> int:
    """Return the step of a snapshot by its full name; 0 without one."""
    name = SnapshotName.parse(snapshot)
    return 0 if name is None else name.step


def _resumes(records: Mapping[int, AttemptRecord]) -> dict[str, int]:
    """Return end of the attempt before -> number of attempts that went on from a snapshot. Pure."""
    found = dict.fromkeys(ENDS, 0)
    before: AttemptRecord | None = None
    for _, record in sorted(records.items()):
        if record.parent not in (None, "", UNDECIDED) and before is not None:
            end = str((before.outcome or {}).get("outcome"))
            found[end if end in ENDS else UNKNOWN] += 1
        before = record
    return found
