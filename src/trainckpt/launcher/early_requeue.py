"""Requeue a Slurm job that is stopped before its ranks could ask for it.

Ranks request the requeue after their commit. A signal during their imports ends them before that,
and Slurm would count the job as completed. So the supervisor of the first task asks; likewise if
the ranks were dumped instead of receiving the signal. A nested supervisor asks by itself.

A restarted job must find its run. So the job's comment records that this command has begun no run,
unless the run directory is known to hold one, or does not answer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainckpt.attempt.launch import recorded_options
from trainckpt.errors import INTERRUPTED, ConfigurationError, TrainckptError
from trainckpt.format.attempt_record import STOPPED
from trainckpt.format.dump import KIND as DUMP
from trainckpt.launcher.outcome import start_again_code
from trainckpt.launcher.supervise import TOO_EARLY, RunResult
from trainckpt.launcher.torchrun_command import likely_run
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.storage.worker_pool import answer_within, aside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.launcher.supervisor_signals import Inbox

    Result = TypeVar("Result")

TASK_VARIABLE = "SLURM_PROCID"
NOTICE_S = 0.1
LOOK_S = 1.0  # Slurm's KillWait runs, and the requeue is still to be asked for


@dataclass(frozen=True)
class FirstLaunch:
    """A command that begins its run, if there is none."""

    command_digest: str  # hash of the command, see `attempt.launch`
    argv: Sequence[str]
    run: str | None  # its run directory, if the launcher names it


def unless_signalled(look: Callable[[], Result], inbox: Inbox) -> Result | None:
    """Return the result of `look`, or its error; None once a signal comes. Main thread.

    A place that does not answer would delay the end by a minute, so `look` is then abandoned.
    """
    wait_for_result = aside(look)
    while (result := wait_for_result(NOTICE_S)) is None and not inbox.signalled:
        pass
    return None if result is None or inbox.signalled else result()


def before_launch(inbox: Inbox) -> RunResult:
    """Return the result of a command stopped by a signal before its launch."""
    start_again = start_again_code(os.environ, None)
    code = INTERRUPTED if inbox.interrupts > 1 else start_again
    return RunResult(code, None, 0, TOO_EARLY, start_again=start_again)


def ask_to_be_queued_again(
    ended: RunResult,
    inbox: Inbox,
    facts: Mapping[str, Any] | None = None,
    first: FirstLaunch | None = None,
) -> None:
    """Request a requeue, if it is due and no rank did. Main thread, while `inbox` is entered.

    Args:
        ended: Result of the command.
        inbox: Has the first signal.
        facts: Facts of the attempt to continue, if the command has none of its own.
        first: The command, if it may begin its run; None: it continues one.
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
    try:
        is_wanted = recorded_options(launch_facts).requeue != "never"
    except ConfigurationError:  # the next start reports it
        is_wanted = True
    if requeue is not None and is_wanted:
        prepare()
        has_begun = first is None or ended.begun or ended.record is not None or _may_be_there(first)
        requeue.ask(inbox.first, unbegun="" if first is None or has_begun else first.command_digest)


def _may_be_there(first: FirstLaunch) -> bool:
    """Return True if the named run directory holds a run, or does not answer in time."""

    def look() -> bool:
        run = first.run or likely_run(first.argv, None)
        return run is not None and attempt_history.run_id(run_url.open_tier_at(run)) is not None

    try:
        return answer_within(first.run or "the run's place", look, LOOK_S)
    except (TrainckptError, OSError):
        return True
