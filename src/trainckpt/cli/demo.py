"""demo: prove that checkpoints resume exactly, on a small built-in example; needs no clone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.cli.prove import _say, report
from trainckpt.prove.proof import prove

if TYPE_CHECKING:
    import argparse

EXAMPLE = "trainckpt.prove.builtin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument(
        "--nproc",
        type=output.count,
        metavar="N",
        help="processes of torchrun (default: no torchrun)",
    )
    parser.add_argument(
        "--stops", type=output.count, default=2, metavar="N", help="number of stops (default: 2)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prove the built-in example."""
    spec = find_spec(EXAMPLE)  # which does not import it: that would import torch
    assert spec is not None
    assert spec.origin is not None
    proof = prove([spec.origin], stops=arguments.stops, nproc=arguments.nproc, keep=None, say=_say)
    return report(proof, as_json=arguments.json)
