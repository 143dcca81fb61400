"""prove: run a script straight, then stopped and resumed, and compare every bit."""

from __future__ import annotations

import argparse

from trainckpt.cli import output
from trainckpt.cli.output import tell
from trainckpt.errors import ConfigurationError
from trainckpt.prove.proof import Proof, prove


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument(
        "--stops", type=output.count, default=3, metavar="N", help="number of stops (default: 3)"
    )
    parser.add_argument(
        "--nproc",
        type=output.count,
        metavar="N",
        help="processes of torchrun (default: no torchrun)",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep logs and records in this folder")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] SCRIPT ARGS", help="the script"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prove, print what was found, and return 0 if it is exact, else 1."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigurationError("no script was given", hint="trainckpt prove -- train.py")
    proof = prove(
        command, stops=arguments.stops, nproc=arguments.nproc, keep=arguments.keep, say=_say
    )
    return report(proof, as_json=arguments.json)


def report(proof: Proof, *, as_json: bool) -> int:
    """Print the verdict."""
    if as_json:
        output.document(proof.to_json())
    else:
        print(proof.verdict())
    return 0 if proof.exact else 1


def _say(line: str) -> None:
    tell(f"prove: {line}")
