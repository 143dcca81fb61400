"""What `flush` and `fetch` share: one checkpoint, from some tiers to others.

And the process dump that the run ended with, if that is what a resume goes on from.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import dump_home, show
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.dump import DumpName
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.places import everywhere as tiers_of
from trainckpt.lifecycle.places.everywhere import Moved
from trainckpt.process_dump import restore
from trainckpt.snapshot import catalog, flush
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier


def move(
    arguments: argparse.Namespace,
    everywhere: Everywhere,
    wanted: str | None,
    targets: Sequence[Tier],
    sources: Sequence[Tier],
    silent: Mapping[str, str],
) -> int:
    """Copy what is called `wanted`, or the latest; 69 if a target did not answer."""
    name = DumpName.parse(wanted or "")
    dump = name or (_newest_dump(everywhere, sources) if wanted is None else None)
    manifest = None
    if name is None and not (dump is not None and not _has_snapshots(everywhere, sources)):
        manifest = _manifest(everywhere, wanted, sources)
    total = 0 if manifest is None else sum(file.num_bytes for _, file in files_of(manifest))
    with show.progress() as progress:
        task = progress.add_task("copying", total=len(targets) * total or None)

        def tell(num_bytes: int) -> None:
            progress.advance(task, num_bytes)

        moved = []
        if manifest is not None:
            moved += [tiers_of.move(everywhere, manifest, t, sources, tell) for t in targets]
        if dump is not None:
            must = name is not None
            moved += [_move_dump(everywhere, dump, t, sources, must=must) for t in targets]
    _tell(arguments, everywhere, moved, silent)
    return TierUnavailable.exit_code if silent else 0


def _tell(
    arguments: argparse.Namespace,
    everywhere: Everywhere,
    moved: Sequence[Moved],
    silent: Mapping[str, str],
) -> None:
    first = moved[0].snapshot if moved else ""
    if arguments.json:
        rows = [{**asdict(one), "bytes": one.num_bytes} for one in moved]
        document = {"run": everywhere.place.url, "snapshot": first, "tiers": rows}
        show.document({**document, "silent": dict(silent)})
        return
    for one in moved:
        print(f"{one.snapshot} in {one.tier}: {one.how}, {show.size(one.num_bytes)} written")
    for tier, why in silent.items():
        print(f"{first} in {tier}: it does not answer: {why}")


def _newest_dump(everywhere: Everywhere, sources: Sequence[Tier]) -> DumpName | None:
    """The one that a resume goes on from, if a source holds it."""
    name = dump_home.wanted(everywhere.records)
    there = name is not None and any(tier.size(name.record) is not None for tier in sources)
    return name if there else None


def _has_snapshots(everywhere: Everywhere, sources: Sequence[Tier]) -> bool:
    found = catalog.read_copies(sources, everywhere.run, everywhere.records)
    return any(candidate.usable for candidate in found)


def _move_dump(
    everywhere: Everywhere, name: DumpName, target: Tier, sources: Sequence[Tier], *, must: bool
) -> Moved:
    """To the run's place or from it; `must`: it was asked for by its name."""
    place, run = everywhere.place, everywhere.run
    if target is place:
        num_bytes = dump_home.fetch(everywhere, name, sources)
    else:
        if (why := _why_not_sent(everywhere, name, target)) and not must:
            return Moved(target.name, str(name), f"not sent: {why}", 0)
        flush.found_there(place, target, run)
        flush.mirror_records(place, target, {})
        num_bytes = dump_copies.send(place, target, run, name)
    how = tiers_of.COPIED if num_bytes else tiers_of.WAS_THERE
    return Moved(target.name, str(name), how, num_bytes)


def _why_not_sent(everywhere: Everywhere, name: DumpName, target: Tier) -> str:
    if everywhere.place.size(name.record) is None:
        return f"{everywhere.place.url} has lost it: `trainckpt fetch` brings it back"
    record = restore.load(everywhere.place, everywhere.run, name)
    return dump_copies.why_not_sent(record, target)


def _manifest(everywhere: Everywhere, wanted: str | None, sources: Sequence[Tier]) -> Manifest:
    """What to copy, of what the sources hold."""
    found = catalog.read_copies(sources, everywhere.run, everywhere.records)
    candidate = catalog.find(found, wanted or "latest", everywhere.place.url)
    if candidate.manifest is None or (not candidate.usable and not candidate.tiers):
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {everywhere.place.url}, and name another",
        )
    return candidate.manifest
