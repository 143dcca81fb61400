"""fetch: copy a checkpoint from a slower tier to the run directory, or repair its copy there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.cli import copy_snapshot
from trainckpt.format.names import split_target
from trainckpt.run_directory.run_tiers import open_everywhere

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="TIER",
        help="one tier, by name or URL (default: the nearest good copy of each file)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Copy to the run's place. One that holds no run becomes that of the run the tier holds."""
    run, snapshot = split_target(arguments.target)
    source = arguments.source
    named_urls = [source] if source and ("/" in source or "://" in source) else []
    everywhere = open_everywhere(run, *named_urls)
    sources = (everywhere.holding(source),) if source else everywhere.tiers
    return copy_snapshot.move(
        arguments,
        everywhere,
        wanted=snapshot,
        targets=[everywhere.place],
        sources=sources,
        silent={},
    )
