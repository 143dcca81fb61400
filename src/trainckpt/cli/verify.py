"""verify: read and check every byte of a run's checkpoints, naming each bad file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from trainckpt.cli import show
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import MANIFEST, split_target
from trainckpt.lifecycle import place, source
from trainckpt.snapshot import catalog
from trainckpt.snapshot import verify as verifying
from trainckpt.snapshot.verify import Copy

if TYPE_CHECKING:
    import argparse

    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.tiers.base import Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]")


def execute(arguments: argparse.Namespace) -> int:
    """Check every committed snapshot, or one; 65 if any copy is bad."""
    run, wanted = split_target(arguments.target)
    tier = place.open_place(run)
    candidates = source.read_candidates(tier)
    chosen = (catalog.find(candidates, wanted),) if wanted else candidates
    chosen = tuple(c for c in chosen if wanted or c.reason != catalog.NOT_COMMITTED)
    copies = _check(tier, chosen)
    ok = all(copy.ok for copy in copies)
    if arguments.json:
        show.document({"ok": ok, "copies": [asdict(copy) for copy in copies]})
    else:
        rows = [(c.snapshot, c.tier, c.file, "ok" if c.ok else c.reason) for c in copies]
        show.table(("snapshot", "tier", "file", "found"), rows, title=tier.url)
        print(f"{len(copies)} files checked, {sum(not c.ok for c in copies)} bad")
    return 0 if ok else UnusableSnapshot.exit_code


def _check(tier: Tier, chosen: tuple[Candidate, ...]) -> list[Copy]:
    found: list[Copy] = []
    listed = (c.manifest for c in chosen if c.manifest)
    total = sum({k: f.num_bytes for m in listed for k, f in verifying.files_of(m)}.values())
    known: dict[tuple[str, int, str, str], str] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total)
        for candidate in chosen:
            if candidate.manifest is None:
                found.append(
                    Copy(
                        str(candidate.name), tier.name, MANIFEST, ok=False, reason=candidate.reason
                    )
                )
                continue
            found += verifying.verify(
                tier, candidate.manifest, lambda n: progress.advance(task, n), known
            )
    return found
