"""What `flush` and `fetch` share: one checkpoint, from some tiers to others."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from trainckpt.cli import show
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.lifecycle import everywhere as tiers_of
from trainckpt.snapshot import catalog
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.everywhere import Everywhere
    from trainckpt.tiers.base import Tier


def move(
    arguments: argparse.Namespace,
    everywhere: Everywhere,
    wanted: str | None,
    targets: Sequence[Tier],
    sources: Sequence[Tier],
    silent: Mapping[str, str],
) -> int:
    """Copy the snapshot that is called `wanted`, or the latest; 69 if a target did not answer."""
    manifest = _manifest(everywhere, wanted, sources)
    total = len(targets) * sum(file.num_bytes for _, file in files_of(manifest))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("copying", total=total)

        def tell(num_bytes: int) -> None:
            progress.advance(task, num_bytes)

        moved = [tiers_of.move(everywhere, manifest, t, sources, tell) for t in targets]
    if arguments.json:
        rows = [{**asdict(one), "bytes": one.num_bytes} for one in moved]
        document = {"run": everywhere.place.url, "snapshot": str(manifest.name), "tiers": rows}
        show.document({**document, "silent": dict(silent)})
    else:
        for one in moved:
            print(f"{one.snapshot} in {one.tier}: {one.how}, {show.size(one.num_bytes)} written")
        for tier, why in silent.items():
            print(f"{manifest.name} in {tier}: it does not answer: {why}")
    return TierUnavailable.exit_code if silent else 0


def _manifest(everywhere: Everywhere, wanted: str | None, sources: Sequence[Tier]) -> Manifest:
    """What to copy, of what the sources hold."""
    found = catalog.read_copies(sources, everywhere.run, everywhere.records)
    candidate = catalog.find(found, wanted or "latest")
    if candidate.manifest is None or (not candidate.usable and not candidate.tiers):
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {everywhere.place.url}, and name another",
        )
    return candidate.manifest
