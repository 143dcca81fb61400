"""Slurm: the job's end, preemption or cancellation, and the request for a requeue.

Slurm's signals to the processes of a step (`srun`), and the right action after the save:

    preempted       SIGTERM at the start of the partition's GraceTime, SIGKILL at its end    requeue
    time limit      the signal of `sbatch --signal=USR1@120`, that long before the end       requeue
    `scontrol requeue` by somebody   SIGTERM, SIGKILL after KillWait; queued already         leave
    `scancel`       the same, but the job is wanted gone                                     leave

The signal alone does not tell these apart; `scontrol show job` does. A job whose processes leave by
themselves during their grace time has completed, and Slurm does not requeue it. So the requeue is
requested first, after the commit, and the processes leave then. If it is refused and the job is
preempted, the processes linger until they are killed. They also linger if Slurm cannot be asked and
they are part of a step: Slurm sends SIGTERM to no others.

A start stopped before its run has begun leaves no run for the next one to find, which must not look
like a lost run. The job's comment records this, and Slurm keeps it from start to start; a later
start adds it only if it found the mark of its predecessor. It counts for one command and once.

`parse_job` and `decide` are pure; `Scontrol` is the only place that runs a command.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.format.duration import MOST_S
from trainckpt.notice import Notice, PolledSource
from trainckpt.preemption.wall_time import REASON as WALL_TIME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REQUEUE, LINGER, LEAVE = "requeue", "linger", "leave"
STEP_VARIABLE = "SLURM_STEP_ID"  # set by srun, and not for the batch shell
UNKNOWN = "UNKNOWN"  # not a state of Slurm's: it answers, and knows no such job
_NO_SUCH_JOB = "Invalid job id"
ASK_AGAIN_S, MOST_ASKED = 60.0, 5
FROM_SLURM = ("SIGTERM", "SIGUSR1", WALL_TIME)
COMMAND_S = 30.0
RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
_NOT_BEGUN = "trainckpt:no-run-began-before-restart-"
_OUR_WORD = re.compile(rf"(?:^| )({_NOT_BEGUN}([0-9]+)\S*)(?=\s|$)")
_COMMENT = re.compile(r"\s*Comment=(.*)")
_FIELD = re.compile(r"(?:^|\s)(JobState|PreemptTime|EndTime|StartTime)=(\S*)")
_NEXT_FIELD = re.compile(r"\s+[A-Z][A-Za-z/:]*=")
_ID = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Job:
    """A job's state in Slurm's controller."""

    state: str  # "RUNNING", "PENDING", "CANCELLED", "TIMEOUT" and so on, or `UNKNOWN`
    is_preempted: bool = False  # a grace time runs, or has run out
    starts_at: float | None = None  # seconds since the epoch; None: unknown
    ends_at: float | None = None  # the same; None: unknown, or unlimited
    comment: str | None = ""  # None: not separable from the rest


def job_to_requeue(environment: Mapping[str, str]) -> str | None:
    """Return the id for `scontrol requeue`: the job, or this one task of an array; None: no job.

    An array's own id stands for all of its tasks, and SLURM_JOB_ID of its last task is that id. A
    heterogeneous job is requeued by its leader.
    """
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_JOB_ID", "SLURM_JOB_ID")
    array, task, leader, job = (_number(environment.get(name, "")) for name in names)
    return f"{array}_{task}" if array and task else leader or job


def parse_job(text: str) -> Job | None:
    """Return the first job of `scontrol show job`, times as seconds since the epoch.

    None where the text shows none.
    """
    fields: dict[str, str] = {}
    text = text.strip("\n").partition("\n\n")[0]
    for name, value in _FIELD.findall(text):
        fields.setdefault(name, value)
    if "JobState" not in fields:
        return None
    return Job(
        fields["JobState"],
        is_preempted=_time(fields.get("PreemptTime", "")) is not None,
        starts_at=_time(fields.get("StartTime", "")),
        ends_at=_time(fields.get("EndTime", "")),
        comment=_comment(text.split("\n")),
    )


def _comment(lines: list[str]) -> str | None:
    """Return the comment, a line to itself; None if a comment by people spans several lines."""
    found = [at for at, line in enumerate(lines) if _COMMENT.fullmatch(line)]
    if not found:
        return ""
    after = "".join(lines[found[0] + 1 : found[0] + 2])
    if len(found) > 1 or not _NEXT_FIELD.match(after):
        return None
    text = lines[found[0]].partition("=")[2].rstrip()  # Slurm shows a blank more
    return "" if text == "(null)" else text


def restarts(environment: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted this job."""
    return int(_number(environment.get(RESTARTS_VARIABLE, "")) or 0)


def began_nothing(comment: str, restart: int, command: str) -> bool:
    """Return True if no earlier start of the job has begun this command's run, by its comment.

    Always True for the first start. `command` is a hash.
    """
    return restart == 0 or _word(restart, command) in comment.split()


def noted(comment: str, restart: int, command: str) -> str:
    """Return the comment with the mark that this command begins no run before start `restart`.

    Marks for other starts are dropped; all else stays as it is.
    """
    word = _word(restart, command)
    kept = _OUR_WORD.sub(
        lambda found: found[0] if int(found[2]) == restart and found[1] != word else "", comment
    )
    return f"{kept} {word}" if kept else word


def without_note(comment: str, restart: int, command: str) -> str:
    """Return the comment without the marks of `noted`."""
    word = _word(restart, command)
    return _OUR_WORD.sub(lambda found: "" if found[1] == word else found[0], comment)


def _word(restart: int, command: str) -> str:
    return f"{_NOT_BEGUN}{restart}:{command}"


def decide(reason: str, job: Job | None, *, of_machine: bool = False, in_step: bool = True) -> str:
    """Return the action after the save: `REQUEUE`, `LINGER` or `LEAVE`.

    Args:
        reason: Reason of the stop. After Ctrl-C or a written notice, a person decides about the
            next start.
        job: Slurm's view of the job; None: no answer.
        of_machine: The machine is leaving or unhealthy: the job is wanted all the same.
        in_step: srun started these processes; else a SIGTERM was not Slurm's.
    """
    if reason not in FROM_SLURM and not of_machine:
        return LEAVE
    if job is None:
        return LINGER if reason == "SIGTERM" and in_step else REQUEUE
    return REQUEUE if job.state in ("RUNNING", "TIMEOUT") else LEAVE


def after_refusal(reason: str, job: Job | None, *, in_step: bool = True) -> str:
    """Return the action after a refused requeue: `LINGER` or `LEAVE`."""
    preempted = job.is_preempted if job is not None else reason == "SIGTERM" and in_step
    return LINGER if preempted else LEAVE


class Scontrol:
    """Slurm's own command. Any thread; each call may take up to half a minute.

    Attributes:
        why: Why `show` got no answer; "" if it got one.
    """

    def __init__(self, job: str, environment: Mapping[str, str] | None = None) -> None:
        self.why = ""
        self._job = job
        self._environment = {
            **(os.environ if environment is None else environment),
            "SLURM_TIME_FORMAT": "%s",
        }

    def show(self) -> Job | None:
        """Return the controller's view of the job; None if it does not answer."""
        code, answer = self._call("show", "job", self._job)
        self.why = _refusal(code, answer)
        if code > 0 and _NO_SUCH_JOB in answer:
            return Job(UNKNOWN)
        return parse_job(answer) if code == 0 else None

    def note(self, comment: str, within_s: float = COMMAND_S) -> str:
        """Replace the job's comment. Why it was refused, or ""."""
        words = ("update", f"JobId={self._job}", f"Comment={comment}")
        return _refusal(*self._call(*words, within_s=within_s))

    def requeue(self) -> str:
        """Queue the job again, which ends its processes. Return the reason for a refusal, or ""."""
        return _refusal(*self._call("requeue", self._job))

    def _call(self, *words: str, within_s: float = COMMAND_S) -> tuple[int, str]:
        try:
            done = subprocess.run(
                ["scontrol", *words],  # noqa: S607 - wherever the site has put it
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
                errors="replace",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return -1, f"scontrol cannot be run: {error}"
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def _refusal(code: int, answer: str) -> str:
    return "" if code == 0 else answer.strip()[:300] or f"scontrol ended with {code}"


class JobEnd(PolledSource):
    """Notice source for the job's end, if no variable holds it.

    Slurm's controller is asked at the start, a few times if it does not answer, and once more when
    the time has come: a limit can be raised or lifted. For one rank: a thousand would be too many.
    """

    def __init__(
        self,
        show: Callable[[], Job | None],
        lead_s: Callable[[float], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
    ) -> None:
        """Store the arguments; no query yet.

        Args:
            show: Queries the controller; called in a thread.
            lead_s: Returns the seconds before the end at which to report, given the job's total
                seconds.
            clock, date: The monotonic clock, and seconds since the epoch.
        """
        self._show, self._lead_of, self._clock, self._date = show, lead_s, clock, date
        self._ends_s: float | None = None  # on `clock`
        self._lead_s = 0.0
        self._has_asked_again = self._reported = self._has_answered = False
        self._num_asked, self._ask_next_s = 0, 0.0
        self._asking = threading.Thread()

    def start(self) -> None:
        """Ask, in a thread."""
        self._ask()

    def poll(self) -> list[Notice]:
        """Return one notice, once no more than the lead is left and the limit was not raised."""
        if self._asking.is_alive() or self._reported:
            return []
        if self._ends_s is None:
            if not self._has_answered and self._clock() >= self._ask_next_s:
                self._ask()
            return []
        left_s = self._ends_s - self._clock()
        if left_s > self._lead_s:
            self._has_asked_again = False
            return []
        if not self._has_asked_again:
            self._has_asked_again = True
            self._ask()
            return []
        self._reported = True
        return [Notice(reason=WALL_TIME, seconds_left=max(0.0, left_s))]

    def _ask(self) -> None:
        if not self._has_answered and self._num_asked >= MOST_ASKED:
            return
        self._num_asked += 1
        self._ask_next_s = self._clock() + ASK_AGAIN_S
        self._asking = threading.Thread(target=self._look, name="trainckpt-slurm", daemon=True)
        self._asking.start()

    def _look(self) -> None:
        job, date_s = self._show(), self._date()
        self._has_answered = self._has_answered or job is not None
        if job is None or job.state == UNKNOWN:
            return
        if job.ends_at is not None and job.ends_at <= date_s:
            return
        if job.ends_at is None or job.ends_at - date_s > MOST_S:
            self._ends_s = None  # also where it had one, and its limit was lifted
            return
        self._lead_s = self._lead_of(job.ends_at - (job.starts_at or date_s))
        self._ends_s = self._clock() + job.ends_at - date_s


def _number(text: str) -> str | None:
    return text if _ID.fullmatch(text) else None


def _time(text: str) -> float | None:
    return float(text) if _ID.fullmatch(text) else None
