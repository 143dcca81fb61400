"""run: launch a script with checkpoints through torchrun, and return the exit code it meant."""

from __future__ import annotations

import argparse
import sys

from trainckpt.cli import show
from trainckpt.errors import ConfigurationError
from trainckpt.supervisor.supervise import (
    Ended,
    split_torchrun_options,
    supervise,
    torchrun_command,
)

# None where the command made no Checkpointer, or died too early for its record to say.
KEYS = ("outcome", "snapshot", "kind", "exactness", "lost_micro_batches", "tiers", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--nproc", type=show.count, default=1, help="processes on this host (1)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="[torchrun options] [--] SCRIPT ARGS",
        help="what to run; any option of torchrun may stand before the script",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Launch, wait, and report how the attempt ended."""
    options, command = split_torchrun_options(arguments.command)
    if not command:
        raise ConfigurationError("there is no script to run", hint="trainckpt run -- train.py")
    ended = supervise(
        torchrun_command(arguments.nproc, options, command),
        output=sys.stderr if arguments.json else None,
    )
    return report(ended, as_json=arguments.json)


def report(ended: Ended, *, as_json: bool) -> int:
    """Print how an attempt ended, as JSON if asked for; returns its exit code."""
    outcome = dict(ended.record.outcome or {}) if ended.record else {}
    if as_json:
        show.document({**dict.fromkeys(KEYS), **outcome, "exit_code": ended.exit_code})
    elif outcome:
        where = f", go on from {outcome['snapshot']}" if outcome.get("snapshot") else ""
        how = f"attempt {ended.record.attempt} {outcome['outcome']}" if ended.record else ""
        print(f"trainckpt: {how}{where}; exit code {ended.exit_code}", file=sys.stderr)
    return ended.exit_code
