"""Copy one checkpoint between tiers, for `flush` and `fetch`.

Process dumps are not copied: they are tied to their host, and the snapshot beneath one is what
slower tiers hold.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.errors import ConfigurationError, TierUnavailable, UnusableSnapshot
from trainckpt.format.dump import DumpName
from trainckpt.run_directory import run_tiers as tiers_of
from trainckpt.snapshot import catalog
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.run_directory.run_tiers import RunMoved, RunTiers
    from trainckpt.storage.base import Tier


def move(
    arguments: argparse.Namespace,
    everywhere: RunTiers,
    *,
    wanted: str | None,
    targets: Sequence[Tier],
    sources: Sequence[Tier],
    silent: Mapping[str, str],
) -> int:
    """Copy what is called `wanted`, or the latest; 69 if a target did not answer."""
    if DumpName.parse(wanted or "") is not None:
        raise ConfigurationError(
            f"{wanted} is a process dump, which stays in the run's directory on its host",
            hint=f"name a snapshot of `trainckpt list {everywhere.place.url}`",
        )
    manifest = _manifest(everywhere, wanted, sources)
    total = sum(file.num_bytes for _, file in files_of(manifest))
    with output.progress() as progress:
        task = progress.add_task("copying", total=len(targets) * total)

        def tell(num_bytes: int) -> None:
            progress.advance(task, num_bytes)

        moved = [tiers_of.move(everywhere, manifest, t, sources, tell) for t in targets]
    _tell(arguments, everywhere, moved, silent)
    return TierUnavailable.exit_code if silent else 0


def _tell(
    arguments: argparse.Namespace,
    everywhere: RunTiers,
    moved: Sequence[RunMoved],
    silent: Mapping[str, str],
) -> None:
    snapshot = moved[0].snapshot if moved else ""
    if arguments.json:
        rows = [{**asdict(row), "bytes": row.num_bytes} for row in moved]
        document = {"run": everywhere.place.url, "snapshot": snapshot, "tiers": rows}
        output.document({**document, "silent": dict(silent)})
        return
    for row in moved:
        print(f"{row.snapshot} in {row.tier}: {row.how}, {output.size(row.num_bytes)} written")
    for tier, reason in silent.items():
        print(f"{snapshot} in {tier}: it does not answer: {reason}")


def _manifest(everywhere: RunTiers, wanted: str | None, sources: Sequence[Tier]) -> Manifest:
    """Return the manifest of the snapshot to copy, among those the sources hold."""
    candidates = catalog.read_copies(sources, everywhere.run, everywhere.records)
    candidate = catalog.find(candidates, wanted or "latest", everywhere.place.url)
    if candidate.manifest is None or (not candidate.usable and not candidate.tiers):
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {everywhere.place.url}, and name another",
        )
    return candidate.manifest
