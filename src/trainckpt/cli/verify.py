"""verify: read and check every byte of a run's checkpoints, naming each bad file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from trainckpt.cli import show
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.names import MANIFEST, split_target
from trainckpt.lifecycle.everywhere import open_everywhere
from trainckpt.lifecycle.options import read_options
from trainckpt.snapshot import catalog, memory_copies
from trainckpt.snapshot import verify as verifying
from trainckpt.snapshot.opened import Opener
from trainckpt.snapshot.verify import Copy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator

    from trainckpt.format.manifest import FileEntry
    from trainckpt.lifecycle.everywhere import Everywhere
    from trainckpt.snapshot.catalog import Candidate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]")


def execute(arguments: argparse.Namespace) -> int:
    """Check every committed snapshot in every tier, or one; 65 if any copy is bad."""
    run, wanted = split_target(arguments.target)
    everywhere = open_everywhere(run)
    candidates = everywhere.candidates()
    chosen = (catalog.find(candidates, wanted),) if wanted else candidates
    names = {str(c.name) for c in chosen if wanted or c.reason != catalog.NOT_COMMITTED}
    copies = _check(everywhere, names)
    silent = [
        Copy("", tier, "", ok=False, reason=f"does not answer: {why}")
        for tier, why in everywhere.silent.items()
    ]
    ok = all(copy.ok for copy in [*copies, *silent])
    if arguments.json:
        show.document({"ok": ok, "copies": [asdict(copy) for copy in [*copies, *silent]]})
    else:
        found = [*copies, *silent]
        rows = [(c.snapshot, c.tier, c.file, "ok" if c.ok else c.reason) for c in found]
        show.table(("snapshot", "tier", "file", "found"), rows, title=everywhere.place.url)
        print(f"{len(copies)} files checked, {sum(not c.ok for c in copies)} bad")
    if not all(copy.ok for copy in copies):
        return UnusableSnapshot.exit_code
    return TierUnavailable.exit_code if silent else 0


def _check(everywhere: Everywhere, names: Collection[str]) -> list[Copy]:
    """Every copy of these snapshots, in one tier after the other, and in this host's memory."""
    listed = [
        (tier, candidate)
        for tier in everywhere.tiers
        for candidate in catalog.read_catalog(tier, everywhere.run, everywhere.records)
        if str(candidate.name) in names and candidate.reason != catalog.NOT_COMMITTED
    ]
    total = sum(
        {
            (tier.name, key): file.num_bytes
            for tier, candidate in listed
            for key, file in _files(candidate)
        }.values()
    )
    found: list[Copy] = []
    known: dict[str, dict[tuple[str, int, str, str], str]] = {}
    opener = Opener(read_options({}).identity)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total)
        for tier, candidate in listed:
            if candidate.manifest is None:
                name, reason = str(candidate.name), candidate.reason
                found.append(Copy(name, tier.name, MANIFEST, ok=False, reason=reason))
                continue
            found += verifying.verify(
                tier, candidate.manifest, lambda n: progress.advance(task, n),
                known.setdefault(tier.name, {}), opener,
            )  # fmt: skip
        manifests = {c.name: c.manifest for _, c in listed if c.manifest is not None}
        for manifest in manifests.values():
            found += memory_copies.verify(everywhere.place.url, manifest)
    return found


def _files(candidate: Candidate) -> Iterator[tuple[str, FileEntry]]:
    return verifying.files_of(candidate.manifest) if candidate.manifest is not None else iter(())
