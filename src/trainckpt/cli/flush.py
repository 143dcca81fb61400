"""flush: copy a checkpoint to slower tiers, or repair its copies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.cli import copy_snapshot
from trainckpt.errors import ConfigurationError
from trainckpt.format.names import split_target
from trainckpt.run_directory.run_tiers import open_everywhere

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")
    parser.add_argument("--to", metavar="TIER", help="one tier, by name or URL (default: all)")


def execute(arguments: argparse.Namespace) -> int:
    """Copy, from wherever a good copy is, to every slower tier that answers or to the one named."""
    run, snapshot = split_target(arguments.target)
    everywhere = open_everywhere(run)
    if arguments.to:
        targets = [everywhere.tier(arguments.to)]
    else:
        slower_tiers = [tier for tier in everywhere.tiers if tier is not everywhere.place]
        targets = [*slower_tiers, *everywhere.empty]
    if not targets and not everywhere.silent:
        raise ConfigurationError(
            f"{everywhere.place.url} has no slower tier",
            hint="name one: --to URL, or the option tiers",
        )
    silent = {} if arguments.to else everywhere.silent
    return copy_snapshot.move(
        arguments,
        everywhere,
        wanted=snapshot,
        targets=targets,
        sources=everywhere.tiers,
        silent=silent,
    )
