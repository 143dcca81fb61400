"""Classify the end of a launch from the reports of ranks, agent and supervisor. Pure.

Launchers swallow exit codes, so the process's own code is the last thing to go by:

    we ended it             second interrupt 130; past the deadline 71; in start-up, or dumped, the
                            option `exit_code`, 75 by default
    a rank stopped          its code, 75 by default, unless some rank had failed before that
    a supervisor within     was stopped, or refused: its code, whatever lies between makes of that
    0                       finished
    the first failure       what that rank said (its exception's code) or ended with; what comes
                            after it is consequence: peers lose connections, torchrun ends them
    else                    the process's own code
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.status_files import REFUSED
from trainckpt.errors import INTERRUPTED, START_AGAIN, ConfigurationError, NoAgreement
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.launcher.nested import Nested
    from trainckpt.launcher.torchrun_agent import RankExit

NOTICE = "notice"  # ended in start-up, where nothing was trained yet
# why we ended it ourselves
START_UP, DEADLINE, SECOND_INTERRUPT, OTHERS_LOST = "start-up", "deadline", "interrupt", "lost"
DUMPED = "dumped"
TOGETHER_S = 2.0  # ends so close together do not say which was the cause; busy machines look late
# A lost connection is an exception (1) or an abort; 71 and SIGTERM follow on a peer's failure.
CONSEQUENCES = frozenset({1, NoAgreement.exit_code, -signal.SIGABRT, -signal.SIGTERM})
NOTICES = frozenset(
    -getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n)
)


@dataclass(frozen=True)
class LaunchHistory:
    """Events of one launch, as far as this host knows."""

    code: int  # the launched process's own exit code, 128 + n after a signal
    # last status of each rank of this host, and its time (`time.time`)
    statuses: Sequence[tuple[RankStatus, float]] = ()
    ends: Sequence[RankExit] = ()  # exits of processes, in order
    ours: bool = False  # the command uses trainckpt
    signalled: bool = False  # a signal for the ranks came
    cause: str = ""  # why the supervisor ended it, or ""
    ended_at: float = math.inf  # when it did
    why: str = ""  # the same for people
    script: int | None = None  # process id of the script, if that was launched itself
    dump: str = ""  # name of the dump that it was ended with, or ""
    within: Sequence[Nested] = ()  # last status of each nested supervisor, the oldest first
    to_script: str = ""  # name of the signal sent to the script after its ranks were done, or ""
    start_again: int = START_AGAIN  # the option `exit_code` in the command's environment


@dataclass(frozen=True)
class Outcome:
    """Classified end of a launch."""

    exit_code: int
    how: str  # `FINISHED`, `STOPPED`, `FAILED`, `KILLED`, `REFUSED` or `NOTICE`
    why: str  # for people
    on_purpose: bool = False  # it was to end, and is not started again
    dump: str = ""  # as in `LaunchHistory`
    within: bool = False  # reported by a nested supervisor, which has handled it


@dataclass(frozen=True)
class _Failure:
    at: float
    code: int
    how: str
    who: str
    has_said_so: bool

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    @property
    def may_be_consequence(self) -> bool:
        return self.code in CONSEQUENCES

    def is_before(self, at: float) -> bool:
        """Return True also for an unknown time, unless it may be a consequence."""
        return self.at < at or (math.isinf(self.at) and not self.may_be_consequence)


def classify(history: LaunchHistory) -> Outcome:
    """Return the outcome of a launch."""
    if history.cause == SECOND_INTERRUPT:
        return Outcome(INTERRUPTED, KILLED, "a second interrupt", on_purpose=True)
    if history.cause == START_UP:
        return Outcome(history.start_again, NOTICE, history.why, on_purpose=True)
    if history.cause == DUMPED:
        code, dump = history.start_again, history.dump
        return Outcome(code, STOPPED, history.why, on_purpose=True, dump=dump)
    failures = _failures(history)
    stop = _stop(history, failures) or _stop_within(history)
    if stop is not None:
        return stop
    if history.cause == DEADLINE:
        return Outcome(NoAgreement.exit_code, KILLED, history.why, on_purpose=True)
    if history.code == 0:
        return Outcome(0, FINISHED, "finished")
    if (signalled := _script_signalled(history, failures)) is not None:
        return signalled
    if failures:
        return _from_first(failures, history)
    if history.cause == OTHERS_LOST:
        return Outcome(history.code, KILLED, history.why)
    is_killed = history.code > 128
    ending = f"died of {_name(128 - history.code)}" if is_killed else f"ended with {history.code}"
    return Outcome(history.code, KILLED if is_killed else FAILED, f"the command {ending}")


def start_again_code(environment: Mapping[str, str], cwd: str | Path | None) -> int:
    """Return the exit code for "saved, start me again" of a command with this environment.

    The default if an option is unreadable: the ranks refuse it by name.
    """
    from trainckpt.attempt.options import read_options

    try:
        return read_options({}, environment, Path(cwd or ".")).exit_code
    except (ConfigurationError, OSError):
        return START_AGAIN


def _stop(history: LaunchHistory, failures: Sequence[_Failure]) -> Outcome | None:
    """Return the stop, unless it was the consequence of a failure."""
    stops = [
        (s, stopped_at) for s, stopped_at in history.statuses if s.how == STOPPED and s.exit_code
    ]
    if not stops:
        return None
    first_stop = min(stopped_at for _, stopped_at in stops)
    if not history.signalled and any(failure.is_before(first_stop) for failure in failures):
        return None
    status = min((status for status, _ in stops), key=lambda t: t.rank)
    assert status.exit_code is not None
    return Outcome(status.exit_code, STOPPED, "stopped", on_purpose=True)


def _script_signalled(history: LaunchHistory, failures: Sequence[_Failure]) -> Outcome | None:
    """Return the end of a script killed by a signal between two runs, or after its last one.

    Started again it goes on there: what is finished is not trained again.
    """
    if not history.to_script:
        return None
    # torchrun turns the first into the second
    codes = (-signal.Signals[history.to_script], -signal.SIGTERM)
    if 128 - history.code not in codes or any(failure.code not in codes for failure in failures):
        return None
    reason = f"the script died of {history.to_script} after its run was over"
    return Outcome(history.start_again, NOTICE, reason, on_purpose=True)


def _stop_within(history: LaunchHistory) -> Outcome | None:
    """Return the end of the last nested supervisor, if the caller has to know of it.

    A script may answer for a stop that was not reported here.
    """
    ended = [status for status in history.within if status.exit_code is not None]
    if not ended or not (history.signalled or history.code != 0):
        return None
    last = ended[-1]
    if not last.exit_code or not (last.on_purpose or last.how == REFUSED):
        return None
    return Outcome(last.exit_code, last.how, last.why, on_purpose=True, within=True)


def _failures(history: LaunchHistory) -> list[_Failure]:
    """Return all failures of this launch, in order."""
    by_pid = {status.pid: status for status, _ in history.statuses}
    failures = [
        _Failure(reported_at, status.exit_code, status.how, f"rank {status.rank}", has_said_so=True)
        for status, reported_at in history.statuses
        if status.how in (FAILED, REFUSED) and status.exit_code
    ]
    for end in history.ends:
        status = by_pid.get(end.pid)
        has_said = status and status.how in (STOPPED, FAILED, REFUSED) and status.exit_code
        if end.code != 0 and not has_said and end.at <= history.ended_at:
            rank = status.rank if status else end.rank
            unknown = "the script" if end.pid == history.script else f"process {end.pid}"
            subject = unknown if rank is None else f"rank {rank}"
            how = FAILED if end.code > 0 else KILLED
            failures.append(
                _Failure(end.at, end.code, how, subject, has_said_so=status is not None)
            )
    return sorted(failures, key=lambda failure: failure.at)


def _from_first(failures: Sequence[_Failure], history: LaunchHistory) -> Outcome:
    close = [f for f in failures if f.is_before(failures[0].at + TOGETHER_S)]
    first = next((f for f in close if not f.may_be_consequence), failures[0])
    if first.code in NOTICES and history.ours and not first.has_said_so:
        reason = f"{first.who} got {_name(first.code)} before it listened"
        return Outcome(history.start_again, NOTICE, reason, on_purpose=True)
    if first.code == NoAgreement.exit_code and first.how == FAILED and history.ours:
        said = any(s.how == FAILED and s.exit_code == first.code for s, _ in history.statuses)
        if not said:  # the watcher ended it: a stop that failed
            reason = f"{first.who} exited with 71: ranks did not agree on the stop in time"
            return Outcome(first.code, KILLED, reason, on_purpose=True)
    event = f"died of {_name(first.code)}" if first.code < 0 else f"ended with {first.code}"
    event = "was refused" if first.how == REFUSED else event
    lost = "; the other ranks waited for it in vain" if history.cause == OTHERS_LOST else ""
    return Outcome(first.exit_code, first.how, f"{first.who} {event}{lost}")


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
