"""How a launch ended, from what everybody said of it: ranks, agent, ourselves. Pure.

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

from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    NothingToResume,
    TierUnavailable,
    UnusableSnapshot,
)
from trainckpt.format.attempt import FAILED, FINISHED, KILLED, STOPPED
from trainckpt.lifecycle.run.told import REFUSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.lifecycle.run.told import Told
    from trainckpt.supervisor.nested import Nested
    from trainckpt.supervisor.report import End

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
class Course:
    """What happened, as far as this host knows.

    Attributes:
        code: The launched process's own exit code, 128 + n after a signal.
        told: Last word of each rank of this host, and when it was said (`time.time`).
        ends: How processes ended, first ones first.
        ours: Whether the command uses trainckpt.
        signalled: Whether a signal came to us that the ranks were to hear.
        cause: Why we ended it, or "".
        ended_at: When we did.
        why: What there is to say about that.
        script: Id of the launched process where that is the script itself.
        dump: Name of the dump that it was ended with, or "".
        within: Last word of each supervisor that it has launched, the oldest first.
        passed_on: Name of the signal that its script got once its ranks were done, or "".
        start_again: The option `exit_code`, as far as the command's environment says.
    """

    code: int
    told: Sequence[tuple[Told, float]] = ()
    ends: Sequence[End] = ()
    ours: bool = False
    signalled: bool = False
    cause: str = ""
    ended_at: float = math.inf
    why: str = ""
    script: int | None = None
    dump: str = ""
    within: Sequence[Nested] = ()
    passed_on: str = ""
    start_again: int = START_AGAIN


@dataclass(frozen=True)
class Verdict:
    """How it ended.

    Attributes:
        exit_code: What to return.
        how: `FINISHED`, `STOPPED`, `FAILED`, `KILLED`, `REFUSED` or `NOTICE`.
        why: What died of what; for people.
        on_purpose: Somebody wanted it to end: it is not to be started again.
        dump: As of `Course`.
        within: It is the word of a supervisor within, who has done what there is to do about it.
    """

    exit_code: int
    how: str
    why: str
    on_purpose: bool = False
    dump: str = ""
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


def judge(course: Course) -> Verdict:
    """How it ended."""
    if course.cause == SECOND_INTERRUPT:
        return Verdict(INTERRUPTED, KILLED, "a second interrupt", on_purpose=True)
    if course.cause == START_UP:
        return Verdict(course.start_again, NOTICE, course.why, on_purpose=True)
    if course.cause == DUMPED:
        code, dump = course.start_again, course.dump
        return Verdict(code, STOPPED, course.why, on_purpose=True, dump=dump)
    failures = _failures(course)
    stop = _stop(course, failures) or _stop_within(course)
    if stop is not None:
        return stop
    if course.cause == DEADLINE:
        return Verdict(NoAgreement.exit_code, KILLED, course.why, on_purpose=True)
    if course.code == 0:
        return Verdict(0, FINISHED, "finished")
    if (ended := _passed_on(course, failures)) is not None:
        return ended
    if failures:
        return _from_first(failures, course)
    if course.cause == OTHERS_LOST:
        return Verdict(course.code, KILLED, course.why)
    died = course.code > 128
    how = f"died of {_name(128 - course.code)}" if died else f"ended with {course.code}"
    return Verdict(course.code, KILLED if died else FAILED, f"the command {how}")


def _stop(course: Course, failures: Sequence[_Failure]) -> Verdict | None:
    """The stop, if it was one, and not the consequence of a failure."""
    stops = [(told, at) for told, at in course.told if told.how == STOPPED and told.exit_code]
    if not stops:
        return None
    before = min(at for _, at in stops)
    if not course.signalled and any(failure.is_before(before) for failure in failures):
        return None
    told = min((told for told, _ in stops), key=lambda t: t.rank)
    assert told.exit_code is not None
    return Verdict(told.exit_code, STOPPED, "stopped", on_purpose=True)


def _passed_on(course: Course, failures: Sequence[_Failure]) -> Verdict | None:
    """The end of a script that died of a signal between two runs, or after its last one.

    Started again it goes on there: what is finished is not trained again.
    """
    if not course.passed_on:
        return None
    of_it = (-signal.Signals[course.passed_on], -signal.SIGTERM)  # torchrun makes one of the other
    if 128 - course.code not in of_it or any(each.code not in of_it for each in failures):
        return None
    why = f"the script died of {course.passed_on} after its run was over"
    return Verdict(course.start_again, NOTICE, why, on_purpose=True)


def _stop_within(course: Course) -> Verdict | None:
    """The end of the last supervisor within, if whoever asked for it has to know of that.

    A script may answer for a stop that nobody has told us of.
    """
    ended = [word for word in course.within if word.exit_code is not None]
    if not ended or not (course.signalled or course.code != 0):
        return None
    last = ended[-1]
    if not last.exit_code or not (last.on_purpose or last.how == REFUSED):
        return None
    return Verdict(last.exit_code, last.how, last.why, on_purpose=True, within=True)


def _failures(course: Course) -> list[_Failure]:
    """All failures of this launch, first ones first."""
    by_pid = {told.pid: (told, at) for told, at in course.told}
    found = [
        _Failure(at, told.exit_code, told.how, f"rank {told.rank}", has_said_so=True)
        for told, at in course.told
        if told.how in (FAILED, REFUSED) and told.exit_code
    ]
    for end in course.ends:
        told, _ = by_pid.get(end.pid, (None, 0.0))
        said = told is not None and told.how in (STOPPED, FAILED, REFUSED) and told.exit_code
        if end.code != 0 and not said and end.at <= course.ended_at:
            rank = told.rank if told else end.rank
            unknown = "the script" if end.pid == course.script else f"process {end.pid}"
            who = unknown if rank is None else f"rank {rank}"
            how = FAILED if end.code > 0 else KILLED
            found.append(_Failure(end.at, end.code, how, who, has_said_so=told is not None))
    return sorted(found, key=lambda failure: failure.at)


def _from_first(failures: Sequence[_Failure], course: Course) -> Verdict:
    together = [f for f in failures if f.is_before(failures[0].at + TOGETHER_S)]
    first = next((f for f in together if not f.may_be_consequence), failures[0])
    if first.code in NOTICES and course.ours and not first.has_said_so:
        why = f"{first.who} got {_name(first.code)} before it listened"
        return Verdict(course.start_again, NOTICE, why, on_purpose=True)
    how = first.how
    ended_by_watcher = first.code == NoAgreement.exit_code and how == FAILED and not any(
        told.how == FAILED and told.exit_code == first.code for told, _ in course.told
    )  # fmt: skip
    if ended_by_watcher and course.ours:  # a stop that failed: somebody wanted it to end
        return Verdict(first.code, KILLED, f"{first.who} ended with 71: the stop was not agreed on "
                       "in time", on_purpose=True)  # fmt: skip
    did = f"died of {_name(first.code)}" if first.code < 0 else f"ended with {first.code}"
    did = "was refused" if how == REFUSED else did
    lost = "; the others waited for it in vain" if course.cause == OTHERS_LOST else ""
    return Verdict(first.exit_code, how, f"{first.who} {did}{lost}")


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
