"""rewrap: change who can read encrypted checkpoints, without writing their data anew."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import show
from trainckpt.encryption.keys import parse_recipients
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.names import split_target
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.lifecycle.reading.rewrap import rewrap
from trainckpt.lifecycle.run.options import read_options
from trainckpt.snapshot import catalog
from trainckpt.snapshot.opened import Opener

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="without @SNAPSHOT: all of them")
    parser.add_argument(
        "--to", metavar="RECIPIENTS", required=True,
        help="all who can read it from now on: recipients, or files of them, with commas",
    )  # fmt: skip


def execute(arguments: argparse.Namespace) -> int:
    """Wrap the keys anew, in every tier that answers; 65 if any manifest is bad."""
    recipients = parse_recipients(word.strip() for word in arguments.to.split(","))
    run, wanted = split_target(arguments.target)
    everywhere = open_everywhere(run)
    candidates = everywhere.candidates()
    chosen = (catalog.find(candidates, wanted, everywhere.place.url),) if wanted else candidates
    committed = [c for c in chosen if c.reason != catalog.NOT_COMMITTED]
    names = [c.name for c in committed if c.manifest is None or c.manifest.encryption is not None]
    done = rewrap(everywhere, names, recipients, Opener(read_options({}).identity))
    if arguments.json:
        rows = [asdict(one) for one in done]
        document = {"run": everywhere.place.url, "recipients": list(recipients), "snapshots": rows}
        show.document({**document, "silent": dict(everywhere.silent)})
    else:
        for one in done:
            print(f"{one.snapshot}: {', '.join(one.tiers) or 'nowhere'}", one.reason)
        print(f"{sum(bool(one.tiers) for one in done)} snapshots, for {', '.join(recipients)}")
        for tier, why in everywhere.silent.items():
            print(f"as it was in {tier}, which does not answer: {why}")
    if any(one.reason for one in done):
        return UnusableSnapshot.exit_code
    return TierUnavailable.exit_code if everywhere.silent else 0
