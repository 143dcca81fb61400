"""The supervisor: launches a command, delivers signals, and knows how the attempt ended.

    launch     in a session of its own; TRAINCKPT_SUPERVISOR names the folder of its status files
    watch      signals, deadlines, ranks that are lost (`monitor`)
    classify   the exit code and why, from all status files (`outcome`), and complete the record
               (`supervisor_record`)
    restart    after a failure, as often as is allowed; not after a stop on purpose

After a failure no process of the launch is left behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import status_files
from trainckpt.attempt.launch import AT_VARIABLE, COMMAND_VARIABLE, DUMPS_VARIABLE, command_hash
from trainckpt.attempt.options import THROUGH_TIERS, read_options
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.attempt.time_keeper import LAUNCHED_VARIABLE
from trainckpt.errors import INTERRUPTED, START_AGAIN, ConfigurationError
from trainckpt.format.attempt_record import UNDECIDED
from trainckpt.launcher import supervisor_record
from trainckpt.launcher.dumper import Dumpable, outputs
from trainckpt.launcher.finish_uploads import flush_left
from trainckpt.launcher.monitor import LaunchMonitor
from trainckpt.launcher.nested import LONGEST_WHY, ParentReporter
from trainckpt.launcher.outcome import NOTICE, classify, start_again_code
from trainckpt.launcher.prefetch import beside
from trainckpt.launcher.processes import kill_session
from trainckpt.launcher.supervisor_signals import Inbox, starts_again
from trainckpt.launcher.torchrun_command import (
    RESTARTS_VARIABLE,
    is_torchrun,
    likely_run,
    mentions_us,
    restarts_ranks,
)
from trainckpt.preemption.wall_time import STARTED_VARIABLE, process_start_s
from trainckpt.storage import compile_folder
from trainckpt.storage.store_errors import is_starved, starved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.launcher.outcome import LaunchHistory, Outcome
    from trainckpt.launcher.output_relay import OutputRelay
    from trainckpt.launcher.supervisor_record import NamedRun

    Process = subprocess.Popen[bytes]

RESTART_VARIABLE = "TRAINCKPT_RESTART"
TOO_EARLY = "a signal came before the command was started"
TORCHRUN_GRACE_S = "600"  # torchrun's own 30 s would cut a save short; the deadline is not its


@dataclass(frozen=True)
class RunResult:
    """Result of a supervised command."""

    exit_code: int
    record: AttemptRecord | None  # of the newest attempt; None: the command claimed none
    restarts: int = 0
    why: str = ""  # one sentence for people
    again: bool = False  # a restored launch: the caller may start the command again
    begun: bool = False  # a rank has reported, in any of its launches: there may be a run
    within: bool = False  # a supervisor that it launched has answered for it, to Slurm too
    start_again: int = START_AGAIN  # the exit code for "start me again"


@dataclass(frozen=True)
class _Start:
    """Inputs of one launch."""

    command: Sequence[str]
    variables: Mapping[str, str]
    cwd: str | None
    output: Any
    watch: Callable[[Process], None] | None
    ours: bool
    reporter: ParentReporter
    start_again: int
    run: str | None = None
    dumpable: Dumpable | None = None


def supervise(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    output: Any = None,
    watch: Callable[[Process], None] | None = None,
    max_restarts: int = 0,
    ours: bool = False,
    name: Callable[[], NamedRun] | None = None,
    say: Callable[[str], None] | None = None,
    inbox: Inbox | None = None,
    run: str | None = None,
    dumpable: Dumpable | None = None,
    before: AttemptRecord | None = None,
) -> RunResult:
    """Run `command` to its end, and again where it failed. Main thread.

    Args:
        command, cwd: The command, and its working directory.
        environment: Variables on top of this process's.
        output: Where its stdout goes (and stderr, if it is a file of ours); None: inherited.
        watch: Called with the process, in a thread of its own; its errors are raised here.
        max_restarts: How often a command that failed by itself is started again.
        ours: The command is known to use trainckpt; it may show so itself.
        name: Makes the run of a command that has none, for each launch.
        say: Called with a line for people at each restart.
        inbox: An entered one, if signals are received already.
        run: Directory of the run that will most likely go on; its snapshot is read ahead.
        dumpable: Launch it so that its processes can be dumped, and do so when asked.
        before: The attempt before, if its processes ended under this supervisor.

    Raises:
        ConfigurationError: the command cannot be started.
    """
    variables = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": TORCHRUN_GRACE_S,
        **os.environ,
        COMMAND_VARIABLE: "",
        **(environment or {}),
        STARTED_VARIABLE: str(process_start_s()),
    }
    variables.pop(RESTARTS_VARIABLE, None)
    variables.pop(DUMPS_VARIABLE, None)
    variables |= _compile_caches(command, variables, cwd=cwd, run=run, say=say)
    ours = ours or mentions_us(command, cwd)
    run = run or likely_run(command, cwd)
    with contextlib.nullcontext(inbox) if inbox is not None else Inbox() as signals:
        reporter = ParentReporter()  # an outer supervisor forwards signals from now on
        start = _Start(
            command=command,
            variables=variables,
            cwd=cwd,
            output=output,
            watch=watch,
            ours=ours,
            reporter=reporter,
            start_again=start_again_code(variables, cwd),
            run=run,
            dumpable=dumpable,
        )
        newest = _Newest(before, (), run)
        try:
            result = _launches(
                start, signals, newest=newest, max_restarts=max_restarts, name=name, say=say
            )
        finally:  # whatever ended it, also before the last launch claimed an attempt
            newest.flush(signals, start.variables, say)
        start.reporter.tell(exit_code=result.exit_code)
        return replace(result, record=newest.record, start_again=start.start_again)


def _compile_caches(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    cwd: str | None,
    run: str | None,
    say: Callable[[str], None] | None,
) -> dict[str, str]:
    """Return the variables that keep compile caches where the next launch on this host finds them.

    Caches that will be copied through the tiers lie in a folder of this command alone.
    """
    folder = compile_folder.SHARED
    with contextlib.suppress(ConfigurationError):  # the ranks refuse such options
        if read_options({}, variables, Path(cwd or ".")).compile_cache == THROUGH_TIERS:
            folder = command_hash(command, str(Path(cwd or ".").absolute()), run, {})
    try:
        return compile_folder.variables(folder, variables)
    except OSError as error:
        if say is not None:
            say(f"compile caches are left where torch puts them: {error}")
    return {}


@dataclass
class _Newest:
    """The newest attempt of all launches."""

    record: AttemptRecord | None = None  # None: none was claimed
    ranks: Sequence[RankStatus] = ()
    url: str | None = None  # its run directory, if no rank has reported it

    def note(
        self, found: AttemptRecord | None, ranks: Sequence[RankStatus], named: NamedRun | None
    ) -> None:
        """Record the end of a launch; one that claimed no attempt leaves the record before it in
        place.
        """
        if found is not None:
            self.record, self.ranks = found, ranks
            self.url = named.url if named is not None else None

    def flush(
        self, inbox: Inbox, variables: Mapping[str, str], say: Callable[[str], None] | None
    ) -> None:
        """Copy the uploads left; no other attempt is started here."""
        self.record = flush_left(
            self.record, self.ranks, inbox=inbox, variables=variables, say=say, run=self.url
        )


def _launches(
    start: _Start,
    signals: Inbox,
    *,
    newest: _Newest,
    max_restarts: int,
    name: Callable[[], NamedRun] | None,
    say: Callable[[str], None] | None,
) -> RunResult:
    has_begun, restarts = False, 0
    while True:
        if signals.signalled and start.ours:
            code = INTERRUPTED if signals.interrupts > 1 else start.start_again
            start.reporter.tell(how=NOTICE, why=TOO_EARLY, on_purpose=True)
            return RunResult(code, None, restarts, TOO_EARLY, begun=has_begun)
        named_run = name() if name is not None else None
        outcome, record, ranks, was_signalled = _launch(start, signals, named_run)
        newest.note(record, ranks, named_run)
        has_begun = has_begun or bool(ranks)
        if say is not None and named_run is not None and named_run.problem:
            say(f"--run: {named_run.problem}")
        start.reporter.tell(
            how=outcome.how, why=outcome.why[:LONGEST_WHY], on_purpose=outcome.on_purpose
        )
        if not starts_again(outcome, done=restarts, most=max_restarts, signalled=was_signalled):
            code, reason = outcome.exit_code, outcome.why
            return RunResult(code, None, restarts, reason, begun=has_begun, within=outcome.within)
        restarts += 1
        if say is not None:
            say(f"{outcome.why}; restart {restarts} of {max_restarts}")
        claimed = [status for status in ranks if status.attempt is not None]
        if claimed:
            variables = {**start.variables, RESTART_VARIABLE: str(restarts)}
            if record is not None and record.parent != UNDECIDED:
                variables.pop(AT_VARIABLE, None)  # that attempt began there; this one goes on
            start = replace(start, variables=variables, ours=True, run=claimed[0].run)


def _launch(
    start: _Start, inbox: Inbox, named: NamedRun | None
) -> tuple[Outcome, AttemptRecord | None, Sequence[RankStatus], bool]:
    """Launch once; return how it ended, its record, its ranks' statuses, and if it was to stop."""
    with tempfile.TemporaryDirectory(prefix="trainckpt-") as folder:
        variables = {**start.variables, SUPERVISOR_VARIABLE: folder}
        with contextlib.suppress(OSError):  # then a kill of this process goes unnoticed
            status_files.write_status(
                Path(folder, status_files.SUPERVISOR_FILE), status_files.this_supervisor()
            )
        start.reporter.tell(folder=folder)
        variables[LAUNCHED_VARIABLE] = str(time.monotonic())
        variables |= {DUMPS_VARIABLE: "1"} if start.dumpable is not None else {}
        if named is not None:
            variables[supervisor_record.NAME_VARIABLE] = named.url
        with (
            compile_folder.in_use(variables),
            beside(start.run, variables, variables.get(AT_VARIABLE)),
            outputs(start.dumpable, Path(folder), start.output) as logs,
        ):
            process = _execute(start, variables, logs)
            dumpable = start.dumpable
            launched = LaunchMonitor(
                process,
                Path(folder),
                inbox,
                has_agent=is_torchrun(start.command),
                restarts_ranks=restarts_ranks(start.command),
                ours=start.ours,
                named=named,
                dumper=dumpable.dumper(process, Path(folder), logs, named) if dumpable else None,
            )
            try:
                with _watching(start.watch, process):
                    history = launched.run()
            except BaseException:  # as on a host without a thread left
                kill_session(process)
                raise
        ranks = launched.statuses()
    # A resume of a dump makes this folder again, so it is gone before the dump is announced.
    return classify_and_record(replace(history, start_again=start.start_again), ranks, inbox, named)


def classify_and_record(
    history: LaunchHistory, ranks: Sequence[RankStatus], inbox: Inbox, named: NamedRun | None
) -> tuple[Outcome, AttemptRecord | None, Sequence[RankStatus], bool]:
    """Classify the end of a launch, and complete its record."""
    outcome = classify(
        replace(
            history,
            statuses=[*history.statuses, *supervisor_record.recorded_status_of_rank_0(ranks)],
        )
    )
    was_asked = inbox.signalled or any(status.asked for status in ranks)
    record = supervisor_record.complete_record(ranks, outcome, asked=was_asked)
    # Ranks of a nested supervisor claim attempts of this run, and report to it alone.
    is_ours = named is not None and (named.record is not None or not history.within)
    if record is None and named is not None and is_ours:
        record = named.end(ranks, outcome, ours=history.ours)
    return outcome, record, ranks, was_asked


def _execute(start: _Start, variables: Mapping[str, str], logs: OutputRelay | None) -> Process:
    command = start.command
    streams: dict[str, Any]
    if logs is not None:
        streams = {"stdin": subprocess.DEVNULL, "stdout": logs.out, "stderr": logs.err}
        if start.dumpable is not None:
            command = start.dumpable.command(command, start.cwd, variables.get("PATH"))
    else:
        merges = start.output not in (None, sys.stderr)
        streams = {"stdout": start.output, "stderr": subprocess.STDOUT if merges else None}
    try:
        return subprocess.Popen(
            command, env=dict(variables), cwd=start.cwd, start_new_session=True, **streams
        )
    except OSError as error:
        if is_starved(error):
            raise starved(f"cannot start {start.command[0]}", error) from error
        raise ConfigurationError(
            f"cannot start {start.command[0]}: {error}", hint="check the command and its path"
        ) from error


@contextlib.contextmanager
def _watching(watch: Callable[[Process], None] | None, process: Process) -> Iterator[None]:
    """Run `watch` beside the block; if it raises, all processes are ended, and that is raised."""
    if watch is None:
        yield
        return
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            watch(process)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller's thread
            errors.append(error)
            kill_session(process)

    thread = threading.Thread(target=guarded, name="trainckpt-watched", daemon=True)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]
