"""fetch: copy a checkpoint from a slower tier to the run's place, or make its copy good again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.cli import moving
from trainckpt.format.names import split_target
from trainckpt.lifecycle.places.everywhere import open_everywhere

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="without @SNAPSHOT: the latest")
    parser.add_argument(
        "--from", dest="source", metavar="TIER",
        help="its name, or the URL of one; else from the nearest good copy",
    )  # fmt: skip


def execute(arguments: argparse.Namespace) -> int:
    """Copy to the run's place. One that holds no run becomes that of the run the tier holds."""
    run, wanted = split_target(arguments.target)
    source = arguments.source
    named = [source] if source and ("/" in source or "://" in source) else []
    everywhere = open_everywhere(run, *named)
    sources = (everywhere.holding(source),) if source else everywhere.tiers
    return moving.move(arguments, everywhere, wanted, [everywhere.place], sources, {})
