"""rewrap: change the recipients of encrypted checkpoints, without rewriting their data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.attempt.options import read_options
from trainckpt.cli import output
from trainckpt.encryption.keys import parse_recipients
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.names import split_target
from trainckpt.inspect.rewrap import rewrap
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import catalog
from trainckpt.snapshot.decrypting_tier import KeyRing

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: all snapshots")
    parser.add_argument(
        "--to",
        metavar="RECIPIENTS",
        required=True,
        help="all future readers: recipients, or files of recipients, with commas",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Wrap the keys anew, in every tier that answers; 65 if any manifest is bad."""
    recipients = parse_recipients(word.strip() for word in arguments.to.split(","))
    run, snapshot = split_target(arguments.target)
    everywhere = open_everywhere(run)
    candidates = everywhere.candidates()
    chosen = (catalog.find(candidates, snapshot, everywhere.place.url),) if snapshot else candidates
    committed = [c for c in chosen if c.reason != catalog.NOT_COMMITTED]
    names = [c.name for c in committed if c.manifest is None or c.manifest.encryption is not None]
    rewrapped = rewrap(everywhere, names, recipients, KeyRing(read_options({}).identity))
    if arguments.json:
        rows = [asdict(result) for result in rewrapped]
        document = {"run": everywhere.place.url, "recipients": list(recipients), "snapshots": rows}
        output.document({**document, "silent": dict(everywhere.silent)})
    else:
        for result in rewrapped:
            print(f"{result.snapshot}: {', '.join(result.tiers) or 'nowhere'}", result.reason)
        count = sum(bool(result.tiers) for result in rewrapped)
        print(f"{count} snapshots, for {', '.join(recipients)}")
        for tier, reason in everywhere.silent.items():
            print(f"unchanged in {tier}, no answer: {reason}")
    if any(result.reason for result in rewrapped):
        return UnusableSnapshot.exit_code
    return TierUnavailable.exit_code if everywhere.silent else 0
