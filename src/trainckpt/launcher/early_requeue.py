"""A Slurm job that is stopped before its ranks could ask to be queued again.

Ranks ask to be queued again after their commit. Before they have begun there is nobody to ask: the
signal ends them while they import and build, and a job that leaves so counts as completed. So the
supervisor asks, of the first task alone. What runs next goes on where the run was, if there is one.
A job that is started again must find its run; so Slurm is told where nothing of this command has
begun, unless its place is known to hold a run, or does not answer. Likewise where the ranks were
dumped instead of hearing the signal. A supervisor within another one's launch asks by itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format.attempt_record import STOPPED
from trainckpt.format.dump import KIND as DUMP
from trainckpt.launcher.outcome import INTERRUPTED
from trainckpt.launcher.record import recorded_options, start_again_code
from trainckpt.launcher.supervise import TOO_EARLY, RunResult
from trainckpt.launcher.torchrun_command import likely_run
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.storage.worker_pool import answer_within, aside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.launcher.signals import Inbox

    Result = TypeVar("Result")

TASK_VARIABLE = "SLURM_PROCID"
NOTICE_S = 0.1
LOOK_S = 1.0  # Slurm's KillWait runs, and the requeue is still to be asked for


@dataclass(frozen=True)
class FirstLaunch:
    """A command that begins its run, if there is none."""

    word: str  # stands for it, see `attempt.launch`
    argv: Sequence[str]  # what was launched
    run: str | None  # its run's place, where the launcher names it


def unless_signalled(look: Callable[[], Result], inbox: Inbox) -> Result | None:
    """Return the result of `look`, or its error; None once a signal comes. Main thread.

    A place that does not answer holds it up for a minute. It is left behind then: the process ends.
    """
    wait_for_result = aside(look)
    while (result := wait_for_result(NOTICE_S)) is None and not inbox.signalled:
        pass  # it is waited for above
    return None if result is None or inbox.signalled else result()


def before_launch(inbox: Inbox) -> RunResult:
    """Return the result of a command stopped by a signal before its launch."""
    start_again = start_again_code(os.environ, None)
    code = INTERRUPTED if inbox.interrupts > 1 else start_again
    return RunResult(code, None, 0, TOO_EARLY, start_again=start_again)


def ask_to_be_queued_again(
    ended: RunResult,
    inbox: Inbox,
    sleep: Callable[[float], object] = time.sleep,
    facts: Mapping[str, Any] | None = None,
    first: FirstLaunch | None = None,
) -> None:
    """Ask, where it is right and nobody else does. Main thread, while `inbox` hears signals.

    Args:
        ended: How the command ended.
        inbox: Knows the first signal.
        sleep: How to linger, see `stop.requeue`.
        facts: Of the attempt that the command was to go on from, where it has none of its own.
        first: The command, if it may begin its run; None: it goes on from something.
    """
    outcome = (ended.record.outcome or {}) if ended.record is not None else {}
    # Ranks that stopped have asked; not those of an attempt before, which failed.
    is_theirs = ended.record is not None and outcome.get("outcome") in (None, STOPPED)
    stop_asked = is_theirs and outcome.get("kind") != DUMP
    if (
        stop_asked
        or ended.within
        or ended.exit_code != ended.start_again
        or not inbox.first
        or os.environ.get(TASK_VARIABLE, "0") != "0"
    ):
        return
    from trainckpt.attempt.log import prepare
    from trainckpt.stop.requeue import Requeue

    requeue = Requeue.of(os.environ)
    launch_facts = ended.record.facts if ended.record is not None else facts or {}
    if requeue is not None and _wants(launch_facts):
        prepare()
        has_begun = first is None or ended.begun or ended.record is not None or _may_be_there(first)
        requeue.ask(inbox.first, sleep, unbegun="" if first is None or has_begun else first.word)


def _wants(facts: Mapping[str, Any]) -> bool:
    try:
        return recorded_options(facts).requeue != "never"
    except ConfigurationError:  # as if nobody had set any: the next start says what is wrong
        return True


def _may_be_there(first: FirstLaunch) -> bool:
    """Return True if the run directory holds a run, as far as it is named, or does not answer in
    time.
    """

    def look() -> bool:
        run = first.run or likely_run(first.argv, None)
        return run is not None and attempt_history.run_id(run_url.open_other_place(run)) is not None

    try:
        return answer_within(first.run or "the run's place", look, LOOK_S)
    except (TrainckptError, OSError):
        return True
