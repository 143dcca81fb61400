"""run: launch a script through torchrun with checkpoints, and return its own exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.launch import COMMAND_VARIABLE, command_hash
from trainckpt.attempt.options import THIS_HOST, THROUGH_TIERS, TOML_FILE, read_options
from trainckpt.cli import dumps, output
from trainckpt.cli.output import tell
from trainckpt.errors import ConfigurationError
from trainckpt.launcher.early_requeue import FirstLaunch, ask_to_be_queued_again
from trainckpt.launcher.supervise import RunResult, supervise
from trainckpt.launcher.supervisor_record import NAME_VARIABLE, NamedRun
from trainckpt.launcher.supervisor_signals import signal_inbox
from trainckpt.launcher.torchrun_command import (
    NPROC_OPTIONS,
    is_elastic,
    recorded_form,
    split_torchrun_options,
    take_max_restarts,
    torchrun_command,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# torchrun's options with which the command is no path of a Python script
_NO_SCRIPT = {"-m", "--module", "--no-python", "--no_python"}
_NO_SCRIPT_VARIABLES = {"PET_MODULE", "PET_NO_PYTHON"}  # the same, in the environment
# Of launches whose number of agents changes. Without the first, ranks do not find each other once
# an agent has joined. As agents change, torchrun gives ranks 30 s, whatever its own timeout.
GRACE_VARIABLE = "TRAINCKPT_GRACE"
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", GRACE_VARIABLE: "30 s"}
COMPILE_CACHE_VARIABLE = "TRAINCKPT_COMPILE_CACHE"  # of the option
# None where the command made no Checkpointer, or died too early for its record to say.
KEYS = ("outcome", "snapshot", "kind", "exactness", "lost_micro_batches", "tiers", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument(
        "--run", metavar="RUN", help="run directory or URL, for a script that names none"
    )
    parser.add_argument(
        "--nproc",
        type=output.count,
        default=1,
        metavar="N",
        help="processes on this host (default: 1)",
    )
    parser.add_argument(
        "--compile-cache",
        choices=(THIS_HOST, THROUGH_TIERS),
        help="keep compile caches on this host (default), or copy them through the tiers too",
    )
    dumps.add_arguments(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="[torchrun options] [--] SCRIPT ARGS",
        help="the script; options of torchrun may precede it, such as --max-restarts N",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Launch, wait, and report how the attempt ended."""
    with signal_inbox() as inbox:
        options, command = split_torchrun_options(arguments.command)
        options, restarts = take_max_restarts(options)
        elastic = is_elastic(options)
        if elastic:  # a new agent would be another member: this one has to start the ranks again
            options, restarts = [f"--max-restarts={restarts}", *options], 0
        if not command:
            raise ConfigurationError("no script was given", hint="trainckpt run -- train.py")
        _must_be_there(command, options)
        argv, name = recorded_form(options, command), None
        if arguments.run is not None:
            nproc = processes(arguments.nproc, options)
            dumps.remind(arguments.run)
            name = partial(NamedRun, arguments.run, argv, None, nproc)
        run = arguments.run or os.environ.get(NAME_VARIABLE)
        digest = command_hash(argv, str(Path.cwd()), run, os.environ)
        first_launch = FirstLaunch(digest, argv, run)
        environment = {COMMAND_VARIABLE: digest}
        if elastic:
            environment |= elastic_variables()
        if arguments.compile_cache is not None:
            environment[COMPILE_CACHE_VARIABLE] = arguments.compile_cache
        result = supervise(
            torchrun_command(arguments.nproc, options, command),
            environment=environment,
            output=sys.stderr if arguments.json else None,
            max_restarts=restarts,
            name=name,
            say=say,
            inbox=inbox,
            run=arguments.run,
            dumpable=dumps.dumpable(arguments, say),
        )
        ask_to_be_queued_again(result, inbox, first=first_launch)
    return report(result, as_json=arguments.json)


def elastic_variables() -> dict[str, str]:
    """Return the variables of a launch whose number of agents changes; what is set stands."""
    variables = {name: os.environ.get(name, value) for name, value in ELASTIC.items()}
    with contextlib.suppress(ConfigurationError):  # the ranks refuse such a file
        if read_options({}).origins["grace"] == TOML_FILE:
            del variables[GRACE_VARIABLE]
    return variables


def _must_be_there(command: Sequence[str], options: Sequence[str]) -> None:
    """Else torchrun would start Python with it, once for each process, and tell at length."""
    script = command[0]
    if not _NO_SCRIPT.isdisjoint(options) or not _NO_SCRIPT_VARIABLES.isdisjoint(os.environ):
        return
    with contextlib.suppress(OSError):  # longer than any name, or in a folder that is not ours
        if Path(script).exists():
            return
    if shutil.which(script):
        raise ConfigurationError(
            f"{script} is a program, and the script to run is Python's",
            hint=f"trainckpt run -- {shlex.join(command[1:]) or 'train.py'}, or, for a program, "
            f"trainckpt run --no-python -- {shlex.join(command)}",
        )
    raise ConfigurationError(
        f"there is no script {script} in {Path.cwd()}", hint="trainckpt run -- train.py"
    )


def processes(nproc: int, options: list[str]) -> int:
    """Return the number of processes that torchrun will start here; 1 if only torchrun knows
    ("gpu").
    """
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        if name in NPROC_OPTIONS:
            text = value if equals else following
            return int(text) if text.isdecimal() else 1
    return nproc


def say(line: str) -> None:
    """Print a line for people, while it runs."""
    tell(f"trainckpt: {line}")


def report(ended: RunResult, *, as_json: bool) -> int:
    """Print how an attempt ended, as JSON if asked for; returns its exit code."""
    outcome = dict(ended.record.outcome or {}) if ended.record else {}
    attempt = ended.record.attempt if ended.record else None
    if as_json:
        document = {**dict.fromkeys(KEYS), "reason": ended.why, **outcome, "attempt": attempt}
        document |= {"restarts": ended.restarts, "exit_code": ended.exit_code}
        with contextlib.suppress(OSError):  # what the run came to is its exit code too
            output.document(document)
    elif outcome:
        advice = f", newest snapshot {outcome['snapshot']}" if outcome.get("snapshot") else ""
        say(f"attempt {attempt} {outcome['outcome']}{advice}; exit code {ended.exit_code}")
    elif ended.exit_code:
        say(f"{ended.why}; exit code {ended.exit_code}")
    return ended.exit_code
