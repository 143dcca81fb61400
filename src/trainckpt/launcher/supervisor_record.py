"""Write an attempt's record from the supervisor, if the ranks cannot write it themselves.

Either the attempt died without a report, or the command has no Checkpointer and got a run directory
by `--run`. A rank's own report stands, unless it is only the consequence of another rank's failure:
then that failure is recorded.
"""

from __future__ import annotations

import math
import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat, launch
from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.attempt.status_files import LEFT, REFUSED, RankStatus
from trainckpt.attempt.time_keeper import times_left
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_record import (
    ENDED,
    FAILED,
    FINISHED,
    KILLED,
    RUNNING,
    STOPPED,
    UNDECIDED,
    AttemptRecord,
)
from trainckpt.format.attempt_times import TIMES
from trainckpt.format.dump import KIND as DUMP
from trainckpt.format.exactness import BITWISE
from trainckpt.launcher.outcome import CONSEQUENCES, NOTICE
from trainckpt.launcher.processes import children, environment
from trainckpt.launcher.torchrun_command import is_silent
from trainckpt.resume.candidate_order import DIED_WHILE
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.storage.redact import redact_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.launcher.outcome import Outcome
    from trainckpt.storage.base import RunTier


CLAIM_AFTER_S = 30.0
CLAIM_SILENT_AFTER_S = 3.0  # of a script that does not speak of trainckpt, as far as can be seen
NAME_VARIABLE = run_url.NAME_VARIABLE
BY_SUPERVISOR = "supervisor"


def recorded_status_of_rank_0(ranks: Sequence[RankStatus]) -> list[tuple[RankStatus, float]]:
    """Return rank 0's status and its time from the attempt's record, if it did not report here.

    Rank 0 may be on another host. The list has at most one entry.
    """
    claimed = _attempt_of(ranks)
    if claimed is None or any(status.rank == 0 and status.how for status in ranks):
        return []
    try:
        tier = run_url.open_tier_at(claimed.run)
        record = attempt_history.read_attempt(tier, claimed.attempt or 0)
    except TrainckptError:
        return []
    outcome = (record.outcome or {}) if record is not None else {}
    ending, code, seconds = (outcome.get(key) for key in ("outcome", "exit_code", "seconds"))
    if record is None or not isinstance(ending, str) or type(code) is not int:
        return []
    started, ended_at = record.facts.get("started"), -math.inf
    if isinstance(started, (int, float)) and isinstance(seconds, (int, float)):
        ended_at = started + seconds
    status = RankStatus(
        rank=0,
        pid=-1,
        host="",
        run=claimed.run,
        attempt=claimed.attempt,
        state=LEFT,
        how=ending,
        exit_code=code,
    )
    return [(status, ended_at)]


def _attempt_of(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """Return the lowest rank that belongs to an attempt."""
    claimed = (status for status in ranks if status.attempt is not None)
    return min(claimed, key=lambda status: status.rank, default=None)


def complete_record(
    ranks: Sequence[RankStatus], outcome: Outcome, *, asked: bool = False
) -> AttemptRecord | None:
    """Return the record of these ranks' attempt; write its outcome if it has none.

    None if they claimed no attempt, or its record cannot be read. `asked`: the stop was requested,
    so it says nothing against the snapshot.
    """
    claimed = _attempt_of(ranks)
    if claimed is None:
        return None
    try:
        tier = run_url.open_tier_at(claimed.run)
        record = attempt_history.read_attempt(tier, claimed.attempt or 0)
        if record is None:
            return None
        failed = outcome.how in (FAILED, KILLED)
        by_itself = failed and not asked and not outcome.on_purpose
        entry = record.outcome
        if entry is None and (failed or claimed.rank == 0):
            entry = _entry_of_unreported(record, outcome, _newest_commit(tier, record))
        elif entry is not None and failed and _is_consequence(entry, outcome):
            report = {"exit_code": outcome.exit_code, "reason": outcome.why}
            entry = {**entry, "outcome": outcome.how, **report}
        if entry is not record.outcome and entry is not None:
            entry[DIED_WHILE] = record.state if by_itself else None
            # As the ranks do: only an attempt that failed by itself may count as one that its
            # snapshot, if it never passed a boundary, is to blame for.
            state = record.state if entry["outcome"] == FAILED else ENDED
            facts = {**record.facts}
            if (times := times_left(tier, record)) is not None:
                facts[TIMES] = times.to_json()
            record = record.with_(state=state, outcome=entry, facts=facts)
            attempt_history.replace(tier, record)
        if outcome.dump:
            tier.remove(heartbeat.key_of(record.attempt))
        return record
    except TrainckptError:
        return None


def _is_consequence(entry: Mapping[str, Any], outcome: Outcome) -> bool:
    """Return True if rank 0's recorded outcome is a consequence of another rank's failure.

    It took torchrun's SIGTERM for a notice and stopped, or a connection broke under it.
    """
    ending, code = entry.get("outcome"), entry.get("exit_code")
    is_broken = ending in (FAILED, KILLED) and code in CONSEQUENCES and code != outcome.exit_code
    return ending == STOPPED or is_broken


def _newest_commit(tier: RunTier, record: AttemptRecord) -> str | None:
    """Return the newest snapshot of this attempt, though its record may not name it yet."""
    run = attempt_history.run_id(tier)
    candidates = catalog.read_catalog(tier, run, attempt_history.read_attempts(tier)) if run else ()
    own_names = [c.name for c in candidates if c.usable and c.name.attempt == record.attempt]
    return str(max(own_names)) if own_names else record.newest_commit


def _entry_of_unreported(
    record: AttemptRecord, outcome: Outcome, commit: str | None
) -> dict[str, Any]:
    """Return the outcome of an attempt without a recorded end."""
    parent = record.parent if record.parent != UNDECIDED else None
    started = record.facts.get("started")
    entry = _entry(
        outcome,
        outcome.how if outcome.how in (FAILED, KILLED) else KILLED,
        snapshot=commit or parent,
        started=started if isinstance(started, (int, float)) else None,
    )
    if outcome.exit_code == 0:
        entry["reason"] = "ended without closing its Checkpointer: no final snapshot"
    return entry


def _entry(
    outcome: Outcome, how: str, *, snapshot: str | None, started: float | None
) -> dict[str, Any]:
    dump = outcome.dump  # with one, no micro-batch is lost
    return {
        "outcome": STOPPED if dump else how,
        "snapshot": dump or snapshot,
        "kind": DUMP if dump else "snapshot",
        "exactness": BITWISE if dump else None,
        "lost_micro_batches": 0 if dump else None,
        "tiers": ["local"] if dump or snapshot else [],
        "seconds": round(time.time() - started, 3) if started is not None else None,
        "exit_code": outcome.exit_code,
        "reason": outcome.why,
    }


class NamedRun:
    """`--run`: the run of a command that has no Checkpointer, so that it can be launched again.

    Its attempt is claimed when it is clear that no rank will: after 30 s without trainckpt being
    imported (3 s, if the script does not mention it), or at the end.

    Attributes:
        record: The attempt claimed here, or None.
        problem: Why nothing could be written, or "": the command goes on all the same.
        tier: The run directory.
    """

    def __init__(
        self,
        run: str,
        command: Sequence[str],
        cwd: str | None,
        nproc: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.record: AttemptRecord | None = None
        self.problem = ""
        self.tier = run_url.open_run_tier(run)
        self._command, self._cwd, self._nproc = list(command), cwd or os.getcwd(), nproc  # noqa: PTH109
        self._environment = dict(os.environ if environment is None else environment)
        self._begun, self._pids = time.time(), list[int]()
        silent = is_silent(self._command, self._cwd)
        self._claim_after_s = CLAIM_SILENT_AFTER_S if silent else CLAIM_AFTER_S
        self._heartbeat: Heartbeat | None = None
        self._facts: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        """URL of the run directory."""
        return self.tier.url

    def claim_from(self, parent: str, facts: Mapping[str, Any]) -> AttemptRecord | None:
        """Claim an attempt at once, with the facts of the one that it continues from `parent`.

        Return None, and set `problem`, if that is impossible.
        """
        self._facts = {**facts, "started": self._begun}
        self._claim((), parent)
        return self.record

    def observe(self, parent: int, ranks: Sequence[RankStatus], *, imported: bool) -> None:
        """Note the ranks' processes, and claim an attempt when it is time; call it repeatedly."""
        if self.record is not None:
            return
        if len(self._pids) < self._nproc:
            rank_by_pid = {pid: environment(pid).get("RANK", "") for pid in children(parent)}
            ranks_of = {pid: int(rank) for pid, rank in rank_by_pid.items() if rank.isdecimal()}
            self._pids = sorted(ranks_of, key=ranks_of.__getitem__) or self._pids
        if time.time() - self._begun >= self._claim_after_s and not imported:
            self._claim(ranks)

    def end(
        self, ranks: Sequence[RankStatus], outcome: Outcome, *, ours: bool = False
    ) -> AttemptRecord | None:
        """Record the command's end, unless a rank claimed an attempt.

        A command that uses trainckpt (`ours`) claims attempts itself, once it gets that far. If it
        did not, no run is founded: the next start in a mistyped or unmounted run directory would
        take it for a run without snapshots.
        """
        by_itself = outcome.how == FINISHED or outcome.dump or not ours
        if outcome.how not in (NOTICE, REFUSED) and by_itself:
            self._claim(ranks)
        if self.record is None:
            return None
        ending = outcome.how if outcome.how in (FINISHED, FAILED) else KILLED
        entry = _entry(outcome, ending, snapshot=None, started=self._begun)
        self.record = self.record.with_(state=ENDED, outcome=entry)
        try:
            attempt_history.replace(self.tier, self.record)
        except TrainckptError as error:
            self.problem = error.message
        self.close()
        return self.record

    def close(self) -> None:
        """Stop the heartbeat. May be repeated."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _claim(self, ranks: Sequence[RankStatus], parent: str = UNDECIDED) -> None:
        if self.record is not None or self.problem or any(status.attempt for status in ranks):
            return
        try:
            attempt_history.found_run(self.tier)
            self.record = attempt_history.claim(self.tier, partial(self._new_record, parent=parent))
        except TrainckptError as error:
            self.problem = error.message
            return
        self._heartbeat = Heartbeat(self.tier, self.record.attempt)
        self._heartbeat.start()

    def _new_record(self, attempt: int, parent: str) -> AttemptRecord:
        facts = {
            "argv": redact_arguments(self._command),
            "cwd": self._cwd,
            "env": launch.redact_environment(self._environment),
            "launch": {"kind": "torchrun", "nproc": self._nproc, "by": BY_SUPERVISOR},
            "world": self._nproc,
            "hosts": [socket.gethostname()] * self._nproc,
            "pids": self._pids,
            "started": self._begun,
        }
        return AttemptRecord(attempt, parent, RUNNING, facts=self._facts or facts)
