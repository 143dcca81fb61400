"""Copy one checkpoint between tiers.

flush: copy a checkpoint to slower tiers, or repair its copies there.
fetch: copy a checkpoint from a slower tier to the run directory, or repair its copy there.

Process dumps are not copied: they are tied to their host, and the snapshot beneath one is what
slower tiers hold.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.errors import ConfigurationError, TierUnavailable
from trainckpt.format.dump import DumpName
from trainckpt.format.names import split_target
from trainckpt.run_directory import run_tiers
from trainckpt.snapshot import catalog
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.storage.base import Tier


def add_arguments_flush(parser: argparse.ArgumentParser) -> None:
    """Arguments of `flush`."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")
    parser.add_argument("--to", metavar="TIER", help="one tier, by name or URL (default: all)")


def execute_flush(arguments: argparse.Namespace) -> int:
    """Copy, from wherever a good copy is, to every slower tier that answers or to the one named."""
    everywhere = run_tiers.open_everywhere(split_target(arguments.target)[0])
    if arguments.to:
        return _copy(arguments, everywhere, [everywhere.tier(arguments.to)], everywhere.tiers, {})
    slower_tiers = [tier for tier in everywhere.tiers if tier is not everywhere.run_tier]
    targets = [*slower_tiers, *everywhere.empty]
    if not targets and not everywhere.silent:
        raise ConfigurationError(
            f"{everywhere.run_tier.url} has no slower tier",
            hint="name one: --to URL, or the option tiers",
        )
    return _copy(arguments, everywhere, targets, everywhere.tiers, everywhere.silent)


def add_arguments_fetch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fetch`."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="TIER",
        help="one tier, by name or URL (default: the nearest good copy of each file)",
    )


def execute_fetch(arguments: argparse.Namespace) -> int:
    """Copy to the run's place. One that holds no run becomes that of the run the tier holds."""
    source = arguments.source
    named_urls = [source] if source and "/" in source else []
    everywhere = run_tiers.open_everywhere(split_target(arguments.target)[0], *named_urls)
    sources = (everywhere.holding(source),) if source else everywhere.tiers
    return _copy(arguments, everywhere, [everywhere.run_tier], sources, {})


def _copy(
    arguments: argparse.Namespace,
    everywhere: RunTiers,
    targets: Sequence[Tier],
    sources: Sequence[Tier],
    silent: Mapping[str, str],
) -> int:
    """Copy the snapshot and report it; 69 if a target did not answer."""
    manifest = _manifest(everywhere, split_target(arguments.target)[1] or "latest", sources)
    total = sum(file.num_bytes for _, file in files_of(manifest))
    with output.progress() as progress:
        task = progress.add_task("copying", total=len(targets) * total)

        def advance(num_bytes: int) -> None:
            progress.advance(task, num_bytes)

        moved = [run_tiers.move(everywhere, manifest, t, sources, advance) for t in targets]
    if arguments.json:
        rows = [{**asdict(row), "bytes": row.num_bytes} for row in moved]
        document = {"run": everywhere.run_tier.url, "snapshot": str(manifest.name), "tiers": rows}
        output.document({**document, "silent": dict(silent)})
    else:
        for row in moved:
            print(f"{row.snapshot} in {row.tier}: {row.how}, {output.size(row.num_bytes)} written")
        for tier, reason in silent.items():
            print(f"{manifest.name} in {tier}: it does not answer: {reason}")
    return TierUnavailable.exit_code if silent else 0


def _manifest(everywhere: RunTiers, wanted: str, sources: Sequence[Tier]) -> Manifest:
    """Return the manifest of the snapshot to copy, among those the sources hold."""
    if DumpName.parse(wanted) is not None:
        raise ConfigurationError(
            f"{wanted} is a process dump, which stays in the run's directory on its host",
            hint=f"name a snapshot of `trainckpt list {everywhere.run_tier.url}`",
        )
    candidates = catalog.read_copies(sources, everywhere.run, everywhere.records)
    candidate = catalog.find(candidates, wanted, everywhere.run_tier.url)
    if candidate.manifest is None or (not candidate.usable and not candidate.tiers):
        raise candidate.refusal(everywhere.run_tier.url)
    return candidate.manifest
