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
from typing import TYPE_CHECKING

from trainckpt.attempt.rank_status import REFUSED
from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    NothingToResume,
    TierUnavailable,
    UnusableSnapshot,
)
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.attempt.rank_status import RankStatus
    from trainckpt.launcher.nested import Nested
    from trainckpt.launcher.torchrun_agent import RankExit

NOTICE = "notice"  # ended in start-up, where nothing was trained yet
START_AGAIN, INTERRUPTED = 75, 130
REFUSALS = frozenset(
    error.exit_code
    for error in (UnusableSnapshot, NothingToResume, TierUnavailable, ConfigurationError)
)
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
    # last word of each rank of this host, and when it was said (`time.time`)
    told: Sequence[tuple[RankStatus, float]] = ()
    ends: Sequence[RankExit] = ()  # how processes ended, first ones first
    ours: bool = False  # whether the command uses trainckpt
    signalled: bool = False  # whether a signal came to us that the ranks were to hear
    cause: str = ""  # why we ended it, or ""
    ended_at: float = math.inf  # when we did
    why: str = ""  # what there is to say about that
    script: int | None = None  # id of the launched process where that is the script itself
    dump: str = ""  # name of the dump that it was ended with, or ""
    # last word of each supervisor that it has launched, the oldest first
    within: Sequence[Nested] = ()
    passed_on: str = ""  # name of the signal that its script got once its ranks were done, or ""
    # the option `exit_code`, as far as the command's environment says
    start_again: int = START_AGAIN


@dataclass(frozen=True)
class Outcome:
    """Classified end of a launch."""

    exit_code: int  # what to return
    how: str  # `FINISHED`, `STOPPED`, `FAILED`, `KILLED`, `REFUSED` or `NOTICE`
    why: str  # what died of what; for people
    on_purpose: bool = False  # somebody wanted it to end: it is not to be started again
    dump: str = ""  # as of `LaunchHistory`
    # it is the word of a supervisor within, who has done what there is to do about it
    within: bool = False


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
        """Also where nobody saw when, and it was no consequence of anything that we know of."""
        return self.at < at or (math.isinf(self.at) and not self.may_be_consequence)


def judge(course: LaunchHistory) -> Outcome:
    """Return the outcome of a launch."""
    if course.cause == SECOND_INTERRUPT:
        return Outcome(INTERRUPTED, KILLED, "a second interrupt", on_purpose=True)
    if course.cause == START_UP:
        return Outcome(course.start_again, NOTICE, course.why, on_purpose=True)
    if course.cause == DUMPED:
        code, dump = course.start_again, course.dump
        return Outcome(code, STOPPED, course.why, on_purpose=True, dump=dump)
    failures = _failures(course)
    stop = _stop(course, failures) or _stop_within(course)
    if stop is not None:
        return stop
    if course.cause == DEADLINE:
        return Outcome(NoAgreement.exit_code, KILLED, course.why, on_purpose=True)
    if course.code == 0:
        return Outcome(0, FINISHED, "finished")
    if (passed_on := _passed_on(course, failures)) is not None:
        return passed_on
    if failures:
        return _from_first(failures, course)
    if course.cause == OTHERS_LOST:
        return Outcome(course.code, KILLED, course.why)
    is_killed = course.code > 128
    ending = f"died of {_name(128 - course.code)}" if is_killed else f"ended with {course.code}"
    return Outcome(course.code, KILLED if is_killed else FAILED, f"the command {ending}")


def _stop(course: LaunchHistory, failures: Sequence[_Failure]) -> Outcome | None:
    """Return the stop, unless it was the consequence of a failure."""
    stops = [
        (status, stopped_at)
        for status, stopped_at in course.told
        if status.how == STOPPED and status.exit_code
    ]
    if not stops:
        return None
    first_stop = min(stopped_at for _, stopped_at in stops)
    if not course.signalled and any(failure.is_before(first_stop) for failure in failures):
        return None
    status = min((status for status, _ in stops), key=lambda t: t.rank)
    assert status.exit_code is not None
    return Outcome(status.exit_code, STOPPED, "stopped", on_purpose=True)


def _passed_on(course: LaunchHistory, failures: Sequence[_Failure]) -> Outcome | None:
    """Return the end of a script killed by a signal between two runs, or after its last one.

    Started again it goes on there: what is finished is not trained again.
    """
    if not course.passed_on:
        return None
    signal_codes = (
        -signal.Signals[course.passed_on],
        -signal.SIGTERM,
    )  # torchrun makes one of the other
    if 128 - course.code not in signal_codes or any(
        failure.code not in signal_codes for failure in failures
    ):
        return None
    reason = f"the script died of {course.passed_on} after its run was over"
    return Outcome(course.start_again, NOTICE, reason, on_purpose=True)


def _stop_within(course: LaunchHistory) -> Outcome | None:
    """Return the end of the last supervisor within, if its caller has to know of it.

    A script may answer for a stop that nobody has told us of.
    """
    ended_words = [word for word in course.within if word.exit_code is not None]
    if not ended_words or not (course.signalled or course.code != 0):
        return None
    last_word = ended_words[-1]
    if not last_word.exit_code or not (last_word.on_purpose or last_word.how == REFUSED):
        return None
    return Outcome(last_word.exit_code, last_word.how, last_word.why, on_purpose=True, within=True)


def _failures(course: LaunchHistory) -> list[_Failure]:
    """Return all failures of this launch, in order."""
    by_pid = {status.pid: (status, told_at) for status, told_at in course.told}
    failures = [
        _Failure(told_at, status.exit_code, status.how, f"rank {status.rank}", has_said_so=True)
        for status, told_at in course.told
        if status.how in (FAILED, REFUSED) and status.exit_code
    ]
    for end in course.ends:
        status, _ = by_pid.get(end.pid, (None, 0.0))
        has_said = (
            status is not None and status.how in (STOPPED, FAILED, REFUSED) and status.exit_code
        )
        if end.code != 0 and not has_said and end.at <= course.ended_at:
            rank = status.rank if status else end.rank
            unknown = "the script" if end.pid == course.script else f"process {end.pid}"
            subject = unknown if rank is None else f"rank {rank}"
            kind = FAILED if end.code > 0 else KILLED
            failures.append(
                _Failure(end.at, end.code, kind, subject, has_said_so=status is not None)
            )
    return sorted(failures, key=lambda failure: failure.at)


def _from_first(failures: Sequence[_Failure], course: LaunchHistory) -> Outcome:
    first_failures = [f for f in failures if f.is_before(failures[0].at + TOGETHER_S)]
    first_failure = next((f for f in first_failures if not f.may_be_consequence), failures[0])
    if first_failure.code in NOTICES and course.ours and not first_failure.has_said_so:
        reason = f"{first_failure.who} got {_name(first_failure.code)} before it listened"
        return Outcome(course.start_again, NOTICE, reason, on_purpose=True)
    kind = first_failure.how
    ended_by_watcher = (
        first_failure.code == NoAgreement.exit_code
        and kind == FAILED
        and not any(
            status.how == FAILED and status.exit_code == first_failure.code
            for status, _ in course.told
        )
    )
    if ended_by_watcher and course.ours:  # a stop that failed: somebody wanted it to end
        return Outcome(
            first_failure.code,
            KILLED,
            f"{first_failure.who} exited with 71: ranks did not agree on the stop in time",
            on_purpose=True,
        )
    event_text = (
        f"died of {_name(first_failure.code)}"
        if first_failure.code < 0
        else f"ended with {first_failure.code}"
    )
    event_text = "was refused" if kind == REFUSED else event_text
    lost = "; the other ranks waited for it in vain" if course.cause == OTHERS_LOST else ""
    return Outcome(first_failure.exit_code, kind, f"{first_failure.who} {event_text}{lost}")


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
