"""resume: launch a run's recorded command again, from its newest usable checkpoint."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.cli import show
from trainckpt.cli.run import report
from trainckpt.errors import ConfigurationError, NothingToResume
from trainckpt.lifecycle import launch, place
from trainckpt.lifecycle.resume import AT_VARIABLE
from trainckpt.snapshot import attempts
from trainckpt.supervisor.supervise import supervise, torchrun_command

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--at", metavar="SNAPSHOT", help="go on from this one, on a new branch")
    parser.add_argument("--nproc", type=show.count, help="processes (default: as recorded)")


def execute(arguments: argparse.Namespace) -> int:
    """Launch the newest attempt's command, where and as it was launched."""
    tier = place.open_place(arguments.run)
    if attempts.run_id(tier) is None:
        raise NothingToResume(f"there is no run at {tier.url}", hint="check the path")
    records = attempts.read_attempts(tier)
    told = [r for _, r in sorted(records.items(), reverse=True) if r.facts.get("argv")]
    if not told:
        raise NothingToResume(
            f"no attempt of {tier.url} left its command", hint="start the script again as before"
        )
    facts = told[0].facts
    command, kind, nproc = launch.recorded_command(facts)
    nproc = arguments.nproc or nproc
    if kind == "torchrun" or nproc > 1:
        command = torchrun_command(nproc, ["--no-python"], command)
    print(f"trainckpt: {shlex.join(command)}", file=sys.stderr)
    recorded = facts.get("env") or {}
    variables = {k: v for k, v in recorded.items() if k not in os.environ and v != launch.REDACTED}
    if arguments.at:
        variables[AT_VARIABLE] = arguments.at
    cwd = facts.get("cwd")
    if not isinstance(cwd, str) or not Path(cwd).is_dir():
        raise ConfigurationError(
            f"the recorded working directory {cwd} is not there",
            hint="start the script again as before, from wherever it lies now",
        )
    ended = supervise(
        command,
        environment=variables,
        cwd=cwd,
        output=sys.stderr if arguments.json else None,
    )
    return report(ended, as_json=arguments.json)
