"""resume: launch a run's recorded command again, from its newest usable checkpoint."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.cli import dumps, show
from trainckpt.cli.run import report, say
from trainckpt.errors import ConfigurationError, NothingToResume
from trainckpt.lifecycle import launch, place
from trainckpt.snapshot import attempts
from trainckpt.supervisor.command import take_max_restarts, torchrun_command
from trainckpt.supervisor.early_stop import ask_to_be_queued_again
from trainckpt.supervisor.record import BY_SUPERVISOR, NamedRun
from trainckpt.supervisor.signals import Inbox
from trainckpt.supervisor.supervise import supervise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--at", metavar="SNAPSHOT", help="go on from this one, on a new branch")
    parser.add_argument("--nproc", type=show.count, help="processes (default: as recorded)")
    parser.add_argument(
        "--max-restarts", "--max_restarts", metavar="N",
        help="start it again where it fails, so many times",
    )  # fmt: skip
    parser.add_argument(
        "--accept-older", action="store_true",
        help="go on although a place that does not answer may hold a newer one",
    )  # fmt: skip
    dumps.add_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Launch the newest attempt's command, where and as it was launched."""
    tier = place.open_place(arguments.run)
    facts = _recorded(arguments.run)
    command, kind, nproc = launch.recorded_command(facts)
    nproc = arguments.nproc or nproc
    given = [] if arguments.max_restarts is None else [f"--max-restarts={arguments.max_restarts}"]
    _, restarts = take_max_restarts(given)
    full, with_torchrun = command, kind != launch.PYTHON or nproc > 1
    if with_torchrun:
        full = torchrun_command(nproc, ["--no-python"], command)
    prefix = f"torchrun --nproc-per-node={nproc} " if with_torchrun else ""
    say(prefix + shlex.join(launch.redact_arguments(command)))
    cwd = facts.get("cwd")
    if not isinstance(cwd, str) or not Path(cwd).is_dir():
        raise ConfigurationError(
            f"the recorded working directory {cwd} is not there",
            hint="start the script again as before, from wherever it lies now",
        )
    by_us = facts["launch"].get("by") == BY_SUPERVISOR  # a command without a Checkpointer
    with Inbox() as inbox:
        dumped = dumps.restored(tier, arguments, (command, cwd, nproc), inbox)
        if dumped is not None:
            ask_to_be_queued_again(dumped, inbox)
            return report(dumped, as_json=arguments.json)
        ended = supervise(
            full,
            environment=_variables(facts, arguments),
            cwd=cwd,
            output=sys.stderr if arguments.json else None,
            max_restarts=restarts,
            ours=not by_us,
            name=partial(NamedRun, tier.url, command, cwd, nproc) if by_us else None,
            say=say,
            inbox=inbox,
            run=tier.url,
            dumpable=dumps.dumpable(arguments, say),
        )
        ask_to_be_queued_again(ended, inbox)
    return report(ended, as_json=arguments.json)


def _recorded(run: str) -> Mapping[str, Any]:
    """The facts of the newest attempt that left its command."""
    tier = place.open_place(run)
    if attempts.run_id(tier) is None:
        raise NothingToResume(f"there is no run at {tier.url}", hint="check the path")
    records = attempts.read_attempts(tier)
    told = [r for _, r in sorted(records.items(), reverse=True) if r.facts.get("argv")]
    if not told:
        raise NothingToResume(
            f"no attempt of {tier.url} left its command", hint="start the script again as before"
        )
    return told[0].facts


def _variables(facts: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, str]:
    """What was recorded and this environment lacks, and what the options say."""
    recorded = facts.get("env") or {}
    variables = {
        name: value
        for name, value in recorded.items()
        if name not in os.environ and launch.REDACTED not in value
    }
    if arguments.at:
        variables[launch.AT_VARIABLE] = arguments.at
    if arguments.accept_older:
        variables[launch.ACCEPT_OLDER_VARIABLE] = "1"
    return variables
