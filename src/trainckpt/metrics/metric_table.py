"""The metrics: names, kinds, units and labels. docs/metrics.md has the same table.

Each one has the labels `run` (the run's place, without secrets) and `attempt` besides its own. An
own label has a small fixed set of values: names of tiers, kinds of reasons, buckets of time.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
SECONDS, BYTES, NUMBER = "s", "By", ""  # as UCUM has them
RUN, ATTEMPT = "run", "attempt"
TIER, REASON, BUCKET = "tier", "reason", "bucket"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: As Prometheus has it, with its unit; of a counter with `_total`.
        kind: `COUNTER`, `GAUGE` or `HISTOGRAM`.
        label: Its own label, or "".
        text: What it counts or measures.
    """

    name: str
    kind: str
    unit: str
    label: str
    text: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its labels."""
        return (RUN, ATTEMPT, self.label) if self.label else (RUN, ATTEMPT)

    def labelled(self, shared: dict[str, str], own: str) -> dict[str, str]:
        """Return label -> text of one value: those of all values, and its own if there is one."""
        return {**shared, self.label: own} if self.label else shared


def _metric(name: str, kind: str, text: str, *, unit: str = NUMBER, label: str = "") -> Metric:
    return Metric(f"trainckpt_{name}", kind, unit, label, text)


RUNNING = _metric("running", GAUGE, "1 while the attempt runs; 0 in the last values of one ended")
PUBLISHED = _metric(
    "published_timestamp_seconds",
    GAUGE,
    "When these values were read, in seconds since 1970",
    unit=SECONDS,
)
STEPS = _metric("steps_total", COUNTER, "Optimizer steps since the beginning of the run")
STEP_S = _metric("step_seconds", GAUGE, "Median of the last steps", unit=SECONDS)
STALL = _metric(
    "save_stall_seconds", HISTOGRAM, "Wait of training for a save to be staged", unit=SECONDS
)
STAGE = _metric("stage_seconds", HISTOGRAM, "A save until its state is in memory", unit=SECONDS)
PERSIST = _metric(
    "persist_seconds",
    HISTOGRAM,
    "A save from there until rank 0's file is on stable storage",
    unit=SECONDS,
)
COMMIT = _metric(
    "commit_seconds", HISTOGRAM, "A save from there until all ranks have committed it", unit=SECONDS
)
WRITTEN = _metric(
    "bytes_total", COUNTER, "Bytes of snapshots committed in a tier", unit=BYTES, label=TIER
)
INTERVAL = _metric(
    "save_interval_seconds",
    GAUGE,
    "Seconds from one snapshot in a tier to the next, as they are due",
    unit=SECONDS,
    label=TIER,
)
DURABLE_STEP = _metric(
    "last_durable_step", GAUGE, "Step of the newest snapshot in the durable tier", label=TIER
)
DURABLE_AGE = _metric(
    "last_durable_age_seconds",
    GAUGE,
    "Seconds since that snapshot was taken, or since the launch if that was later",
    unit=SECONDS,
    label=TIER,
)
REPLICA_LAG = _metric(
    "replica_lag_steps",
    GAUGE,
    "Steps trained since the newest snapshot of a slower tier, or of other hosts' memory",
    label=TIER,
)
FAILED = _metric("failed_saves_total", COUNTER, "Saves that failed", label=REASON)
FAILED_IN_A_ROW = _metric(
    "consecutive_failed_saves", GAUGE, "Saves that failed since the last committed one"
)
SKIPPED = _metric(
    "skipped_saves_total", COUNTER, "Saves left out since the one before was still being written"
)
FAILED_COPIES = _metric(
    "failed_copies_total",
    COUNTER,
    "Tries to copy a snapshot to a slower tier that failed",
    label=TIER,
)
VERIFY_FAILURES = _metric(
    "verify_failures_total",
    COUNTER,
    "Copies that did not pass verification when they were read",
    label=TIER,
)
RESTORE = _metric(
    "restore_seconds", GAUGE, "Restore of the attempt, by source", unit=SECONDS, label=TIER
)
RESUMES = _metric(
    "resumes_total", COUNTER, "Resumes of the run, by the end of the attempt before", label=REASON
)
GOODPUT = _metric("goodput_seconds_total", COUNTER, "Training of the run that counts", unit=SECONDS)
BADPUT = _metric(
    "badput_seconds_total", COUNTER, "All other time of the run", unit=SECONDS, label=BUCKET
)
GRACE = _metric(
    "grace_left_seconds",
    GAUGE,
    "Seconds until the deadline of the stop under way; without one, grace of a signal",
    unit=SECONDS,
)

METRICS = (
    *(RUNNING, PUBLISHED, STEPS, STEP_S, STALL, STAGE, PERSIST, COMMIT, WRITTEN, INTERVAL),
    *(DURABLE_STEP, DURABLE_AGE, REPLICA_LAG, FAILED, FAILED_IN_A_ROW, SKIPPED, FAILED_COPIES),
    *(VERIFY_FAILURES, RESTORE, RESUMES, GOODPUT, BADPUT, GRACE),
)
