"""Keep an attempt's number and its record.

`AttemptLog`: rank 0 alone writes the record; other ranks hold it in memory. The training thread and
the saving thread both write, so every change goes through one lock. A change that cannot be written
is logged: the record informs, it never stops training.

`AttemptId`: the number as claimed, until the processes are restored from a dump as another attempt.

    <supervisor's folder>/restored.json    {"attempt", "started", "job_ends"}
    <supervisor's folder>/restoring.pid    of the supervisor, until it has released all processes

The first file also describes the new job: its start on the monotonic clock, and its end as in
Slurm's variable, or null. The supervisor claims the new attempt and writes the file before the
processes run again. So a read before the dump gives the old number, a later one the new. Ranks that
read for one purpose compare the results, and the largest counts.

The processes run again one after the other. If one ends while another is still held, the supervisor
takes that for a failure and ends all. So a process waits until all have been released before it may
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import rank_status
from trainckpt.attempt.heartbeat import is_alive
from trainckpt.attempt.log import logger
from trainckpt.attempt.rank_status import launch_folder, read_status
from trainckpt.errors import TrainckptError
from trainckpt.snapshot import attempt_history
from trainckpt.storage.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Tier


FILE, RESTORING = "restored.json", "restoring.pid"
ALL_RUN_WITHIN_S, LOOK_EVERY_S = 60.0, 0.005


class AttemptId:
    """Current number, read anew each time; without a supervisor the claimed one. Any thread."""

    def __init__(self, claimed: int) -> None:
        self._claimed = claimed
        folder = launch_folder()
        self._file = folder / FILE if folder else None

    @property
    def value(self) -> int:
        """The number now."""
        job = read_status(self._file, OtherJob) if self._file is not None else None
        return self._claimed if job is None else max(job.attempt, self._claimed)


@dataclass(frozen=True)
class OtherJob:
    """The job in which restored processes go on.

    Attributes:
        attempt: Their new attempt.
        started: Start of the job, on the monotonic clock.
        job_ends: Value of `SLURM_JOB_END_TIME`, or None.
    """

    attempt: int
    started: float
    job_ends: str | None


def other_job() -> OtherJob | None:
    """Return the job that this process was restored in; None: it is still in its own."""
    folder = launch_folder()
    return read_status(folder / FILE, OtherJob) if folder else None


def files(attempt: int, started_s: float, job_ends: str | None) -> dict[str, str]:
    """Return the files that announce a restore: new attempt, supervisor, and restore in progress.

    Names and texts, in the order in which they are written.
    """
    job = OtherJob(attempt, started_s, job_ends)
    return {
        RESTORING: str(os.getpid()),
        FILE: json.dumps(asdict(job)),
        rank_status.FILE: json.dumps(asdict(rank_status.this_supervisor())),
    }


def announce_all_run(folder: Path) -> None:
    """Announce that the supervisor has released all restored processes."""
    with contextlib.suppress(OSError):
        (folder / RESTORING).unlink()


def wait_until_all_run(folder: Path) -> None:
    """Wait for `announce_all_run` while the supervisor lives, at most `ALL_RUN_WITHIN_S`."""
    until = time.monotonic() + ALL_RUN_WITHIN_S
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < until:
            if not is_alive(int((folder / RESTORING).read_text(encoding="ascii"))):
                return
            time.sleep(LOOK_EVERY_S)


class AttemptLog:
    """Holds and rewrites one attempt's record."""

    def __init__(self, tier: Tier, record: AttemptRecord, *, writes: bool) -> None:
        self._tier = tier
        self._record = record
        self._writes = writes
        self._number = AttemptId(record.attempt)
        self._lock = threading.Lock()

    @property
    def record(self) -> AttemptRecord:
        """The record as it is now."""
        return self._record

    def set_fact(self, key: str, name: str, value: Any) -> None:
        """Set one name of a table among the record's facts; as `change`."""
        with self._lock:
            self._renumber()
            facts = self._record.facts
            table = {**facts.get(key, {}), name: value}
            self._write(must=False, facts={**facts, key: table})

    def change_soon(self, **changes: Any) -> None:
        """Change as `change`, without a wait for a store. Training thread."""
        if isinstance(self._tier, ObjectStoreTier) and self._writes:
            call = partial(self.change, **changes)
            threading.Thread(target=call, name="trainckpt-record", daemon=True).start()
        else:
            self.change(**changes)

    def change(self, *, must: bool = False, **changes: Any) -> None:
        """Replace some fields, here and (rank 0) in the run directory.

        Args:
            must: Raise if the record cannot be written: without a recorded parent a later attempt
                would take an abandoned branch for its ancestry.
            changes: Fields of `AttemptRecord`.
        """
        with self._lock:
            self._write(must=must, **changes)

    def _renumber(self) -> None:
        """Adopt the attempt that the supervisor has claimed for processes restored from a dump."""
        number = self._number.value
        if number == self._record.attempt:
            return
        with contextlib.suppress(TrainckptError):
            claimed = attempt_history.read_attempts(self._tier).get(number)
            if claimed is not None:
                own = self._record
                facts = {**own.facts, **claimed.facts}
                self._record = claimed.with_(state=own.state, facts=facts)

    def _write(self, *, must: bool, **changes: Any) -> None:
        self._renumber()
        self._record = self._record.with_(**changes)
        if not self._writes:
            return
        try:
            attempt_history.replace(self._tier, self._record)
        except TrainckptError as error:
            if must:
                raise
            logger.warning("the attempt's record could not be written: %s", error.message)
