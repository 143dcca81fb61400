"""Prove that runs resume exactly.

prove: run a script straight, then stopped and resumed, and compare every bit.
demo: prove that checkpoints resume exactly, on a small built-in example; needs no clone.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from trainckpt.cli import output
from trainckpt.cli.output import tell
from trainckpt.errors import ConfigurationError
from trainckpt.prove.proof import Proof, prove

EXAMPLE = "trainckpt.prove.builtin"


def add_arguments_prove(parser: argparse.ArgumentParser) -> None:
    """Arguments of `prove`."""
    _add_common(parser, stops=3)
    parser.add_argument("--keep", metavar="DIR", help="keep logs and records in this folder")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] SCRIPT ARGS", help="the script"
    )


def add_arguments_demo(parser: argparse.ArgumentParser) -> None:
    """Arguments of `demo`."""
    _add_common(parser, stops=2)


def _add_common(parser: argparse.ArgumentParser, stops: int) -> None:
    stops_help = f"number of stops (default: {stops})"
    parser.add_argument("--stops", type=output.count, default=stops, metavar="N", help=stops_help)
    parser.add_argument(
        "--nproc",
        type=output.count,
        metavar="N",
        help="processes of torchrun (default: no torchrun)",
    )


def execute_prove(arguments: argparse.Namespace) -> int:
    """Prove, print what was found, and return 0 if it is exact, else 1."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigurationError("no script was given", hint="trainckpt prove -- train.py")
    return report(_prove(arguments, command, arguments.keep), as_json=arguments.json)


def execute_demo(arguments: argparse.Namespace) -> int:
    """Prove the built-in example."""
    spec = find_spec(EXAMPLE)  # which does not import it: that would import torch
    assert spec is not None
    assert spec.origin is not None
    return report(_prove(arguments, [spec.origin], None), as_json=arguments.json)


def _prove(arguments: argparse.Namespace, command: list[str], keep: str | None) -> Proof:
    return prove(
        command,
        stops=arguments.stops,
        nproc=arguments.nproc,
        keep=keep,
        say=lambda line: tell(f"prove: {line}"),
    )


def report(proof: Proof, *, as_json: bool) -> int:
    """Print the verdict."""
    if as_json:
        output.document(proof.to_json())
    else:
        print(proof.verdict())
    return 0 if proof.exact else 1
