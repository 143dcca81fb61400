"""The supervisor: launches a command, delivers signals, and knows how the attempt ended.

    launch     in a session of its own, told by TRAINCKPT_SUPERVISOR where to leave its words
    watch      signals, deadlines, ranks that are lost (`launched`)
    judge      the exit code and why, from everybody's words (`verdict`); the record (`record`)
    again      where it failed by itself, as often as is allowed; whoever stopped it on purpose
               decides about the next start

After an end that was not in order nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt import UNDECIDED
from trainckpt.lifecycle.run import supervisor_told
from trainckpt.lifecycle.run.command_word import COMMAND_VARIABLE
from trainckpt.lifecycle.run.launch import AT_VARIABLE, DUMPS_VARIABLE
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE
from trainckpt.preemption.wall_time import STARTED_VARIABLE, process_start_s
from trainckpt.supervisor import record as records
from trainckpt.supervisor import recorded_options
from trainckpt.supervisor.command import (
    RESTARTS_VARIABLE,
    is_torchrun,
    likely_run,
    mentions_us,
    split_torchrun_options,
    take_max_restarts,
    torchrun_command,
)
from trainckpt.supervisor.dumpable import Dumpable, outputs
from trainckpt.supervisor.flush_left import flush_left
from trainckpt.supervisor.held import HeldMemory
from trainckpt.supervisor.launched import Launched
from trainckpt.supervisor.nested import LONGEST_WHY, Word
from trainckpt.supervisor.orders import starts_again
from trainckpt.supervisor.prefetch import beside
from trainckpt.supervisor.processes import kill_session
from trainckpt.supervisor.signals import Inbox
from trainckpt.supervisor.verdict import INTERRUPTED, NOTICE, START_AGAIN, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.run.told import Told
    from trainckpt.supervisor.logs import Logs
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.supervisor.verdict import Course, Verdict

    Process = subprocess.Popen[bytes]

__all__ = [
    "Ended",
    "kill_session",
    "split_torchrun_options",
    "supervise",
    "take_max_restarts",
    "torchrun_command",
]

RESTART_VARIABLE = "TRAINCKPT_RESTART"
TOO_EARLY = "a signal came before the command was started"
TORCHRUN_GRACE_S = "600"  # torchrun's own 30 s would cut a save short; the deadline is not its


@dataclass(frozen=True)
class Ended:
    """How a launched command ended.

    Attributes:
        exit_code: What to return to whoever launched us.
        record: The newest attempt's record, or None if the command claimed none.
        restarts: How often it was started again.
        why: What it ended of, one sentence for people.
        again: It was not launched here, and may be started again.
        begun: A rank has spoken, in any of its launches: there may be a run.
        within: A supervisor that it launched has answered for it, to Slurm too.
        start_again: The exit code that says so.
    """

    exit_code: int
    record: AttemptRecord | None
    restarts: int = 0
    why: str = ""
    again: bool = False
    begun: bool = False
    within: bool = False
    start_again: int = START_AGAIN


@dataclass(frozen=True)
class _Start:
    """What one launch needs to know."""

    command: Sequence[str]
    variables: Mapping[str, str]
    cwd: str | None
    output: Any
    watch: Callable[[Process], None] | None
    ours: bool
    memory: HeldMemory
    word: Word
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
    memory: HeldMemory | None = None,
    before: AttemptRecord | None = None,
) -> Ended:
    """Run `command` to its end, and again where it failed. Main thread.

    Args:
        command: What to execute.
        environment: Variables on top of this process's.
        cwd: Working directory.
        output: Where its stdout goes (and stderr, if it is a file of ours); None: inherited.
        watch: Called with the process, in a thread of its own; what it raises is raised here.
        max_restarts: How often a command that failed by itself is started again.
        ours: The command is known to use trainckpt; it may show so itself.
        name: Makes the run of a command that has none, for each launch.
        say: Told of restarts, a line at a time.
        inbox: An entered one, where signals are heard already.
        run: Directory of the run that will most likely go on; its snapshot is read ahead.
        dumpable: Launch it so that its processes can be dumped, and do so when asked.
        memory: Held for the attempt before; it is closed with the rest. None: there was none.
        before: The attempt before, if its processes ended under this supervisor.

    Raises:
        ConfigurationError: the command cannot be started.
    """
    variables = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": TORCHRUN_GRACE_S, **os.environ,
        COMMAND_VARIABLE: "", **(environment or {}),
        STARTED_VARIABLE: str(process_start_s()),
    }  # fmt: skip
    variables.pop(RESTARTS_VARIABLE, None)
    variables.pop(DUMPS_VARIABLE, None)
    ours = ours or mentions_us(command, cwd)
    run = run or likely_run(command, cwd)
    memory = memory or HeldMemory()
    with (
        contextlib.closing(memory),
        contextlib.nullcontext(inbox) if inbox is not None else Inbox() as signals,
    ):
        word = Word()  # from now on signals may be handed on to us
        start = _Start(
            command, variables, cwd, output, watch, ours, memory, word,
            recorded_options.start_again(variables, cwd), run, dumpable,
        )  # fmt: skip
        newest = _Newest(before, (), run)
        try:
            ended = _launches(start, signals, newest, max_restarts, name, say)
        finally:  # whatever ended it, also before the last launch claimed an attempt
            newest.flush(signals, start.variables, say)
        start.word.tell(exit_code=ended.exit_code)
        return replace(ended, record=newest.record, start_again=start.start_again)


@dataclass
class _Newest:
    """The newest attempt of all launches: what it has left is in memory that ends with us, perhaps.

    Attributes:
        record: Its own; None: none was claimed.
        ranks: What its ranks told.
        url: Its run's place, where no rank has told.
    """

    record: AttemptRecord | None = None
    ranks: Sequence[Told] = ()
    url: str | None = None

    def note(
        self, found: AttemptRecord | None, ranks: Sequence[Told], named: NamedRun | None
    ) -> None:
        """How a launch ended; one that claimed no attempt leaves the one before the newest."""
        if found is not None:
            self.record, self.ranks = found, ranks
            self.url = named.url if named is not None else None

    def flush(
        self, inbox: Inbox, variables: Mapping[str, str], say: Callable[[str], None] | None
    ) -> None:
        """No other attempt is started here."""
        self.record = flush_left(self.record, self.ranks, inbox, variables, say, self.url)


def _launches(
    start: _Start,
    signals: Inbox,
    newest: _Newest,
    max_restarts: int,
    name: Callable[[], NamedRun] | None,
    say: Callable[[str], None] | None,
) -> Ended:
    """One after the other, until one is not followed by another."""
    begun, done = False, 0
    while True:
        if signals.signalled and start.ours:
            code = INTERRUPTED if signals.interrupts > 1 else start.start_again
            start.word.tell(how=NOTICE, why=TOO_EARLY, on_purpose=True)
            return Ended(code, None, done, TOO_EARLY, begun=begun)
        named = name() if name is not None else None
        verdict, found, ranks, asked = _launch(start, signals, named)
        newest.note(found, ranks, named)
        begun = begun or bool(ranks)
        if say is not None and named is not None and named.problem:
            say(f"--run: {named.problem}")
        start.word.tell(
            how=verdict.how, why=verdict.why[:LONGEST_WHY], on_purpose=verdict.on_purpose
        )
        if not starts_again(verdict, done=done, most=max_restarts, signalled=asked):
            code, why = verdict.exit_code, verdict.why
            return Ended(code, None, done, why, begun=begun, within=verdict.within)
        done += 1
        if say is not None:
            say(f"{verdict.why}; restart {done} of {max_restarts}")
        claimed = [told for told in ranks if told.attempt is not None]
        if claimed:
            start = replace(_again(start, done, found), run=claimed[0].run)


def _again(start: _Start, restart: int, found: AttemptRecord | None) -> _Start:
    """The next start, after one that claimed an attempt."""
    variables = {**start.variables, RESTART_VARIABLE: str(restart)}
    if found is not None and found.parent != UNDECIDED:
        variables.pop(AT_VARIABLE, None)  # `--at` is where that attempt began; this one goes on
    return replace(start, variables=variables, ours=True)


def _launch(
    start: _Start, inbox: Inbox, named: NamedRun | None
) -> tuple[Verdict, AttemptRecord | None, Sequence[Told], bool]:
    """One launch: how it ended, its record; what its ranks told, and whether it was to stop."""
    with tempfile.TemporaryDirectory(prefix="trainckpt-") as folder:
        variables = {**start.variables, SUPERVISOR_VARIABLE: folder}
        with contextlib.suppress(OSError):  # then nobody notices if this process is killed
            for file, text in supervisor_told.spell().items():
                Path(folder, file).write_text(text, encoding="utf-8")
        start.word.tell(folder=folder)
        variables |= {DUMPS_VARIABLE: "1"} if start.dumpable is not None else {}
        if named is not None:
            variables[records.NAME_VARIABLE] = named.url
        with (
            beside(start.run, variables, variables.get(AT_VARIABLE)),
            outputs(start.dumpable, Path(folder), start.output) as logs,
            start.memory.serving(Path(folder)),
        ):
            process = _execute(start, variables, logs)
            dumpable = start.dumpable
            launched = Launched(
                process, Path(folder), inbox,
                has_agent=is_torchrun(start.command), ours=start.ours, named=named,
                dumping=dumpable.dumping(process, Path(folder), logs, named) if dumpable else None,
            )  # fmt: skip
            with _watching(start.watch, process):
                course = launched.run()
        ranks = launched.told()
    # Whoever resumes a dump makes this folder again, so it is gone before anybody hears of one.
    return settle(replace(course, start_again=start.start_again), ranks, inbox, named)


def settle(
    course: Course, ranks: Sequence[Told], inbox: Inbox, named: NamedRun | None
) -> tuple[Verdict, AttemptRecord | None, Sequence[Told], bool]:
    """Judge how it ended, and write down what nobody else has."""
    told = [*course.told, *records.recorded_word(ranks)]
    verdict = judge(replace(course, told=told))
    asked = inbox.signalled or any(each.asked for each in ranks)
    record = records.settle(ranks, verdict, asked=asked)
    # Ranks of a supervisor within claim attempts of this run, though we do not hear of them.
    is_ours = named is not None and (named.record is not None or not course.within)
    if record is None and named is not None and is_ours:
        record = named.end(ranks, verdict, ours=course.ours)
    return verdict, record, ranks, asked


def _execute(start: _Start, variables: Mapping[str, str], logs: Logs | None) -> Process:
    command, streams = start.command, _streams(start, logs)
    if start.dumpable is not None and logs is not None:
        command = start.dumpable.command(command, start.cwd, variables.get("PATH"))
    try:
        return subprocess.Popen(
            command, env=dict(variables), cwd=start.cwd, start_new_session=True, **streams
        )
    except OSError as error:
        raise ConfigurationError(
            f"{start.command[0]} cannot be started: {error}", hint="check the command and its path"
        ) from error


def _streams(start: _Start, logs: Logs | None) -> dict[str, Any]:
    """Standard input, output and error of the command."""
    if logs is not None:
        return {"stdin": subprocess.DEVNULL, "stdout": logs.out, "stderr": logs.err}
    both = start.output not in (None, sys.stderr)
    return {"stdout": start.output, "stderr": subprocess.STDOUT if both else None}


@contextlib.contextmanager
def _watching(watch: Callable[[Process], None] | None, process: Process) -> Iterator[None]:
    """Run `watch` beside the block; if it raises, everything is ended, and that is raised."""
    errors: list[BaseException] = []

    def guarded() -> None:
        assert watch is not None
        try:
            watch(process)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller's thread
            errors.append(error)
            kill_session(process)

    thread = threading.Thread(target=guarded, name="trainckpt-watched", daemon=True)
    if watch is not None:
        thread.start()
    yield
    if watch is not None:
        thread.join()
    if errors:
        raise errors[0]
