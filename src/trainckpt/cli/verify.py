"""verify: read and check every byte of a run's checkpoints, naming each bad file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import show
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.dump import RECORD, DumpName
from trainckpt.format.names import MANIFEST, SnapshotName, split_target
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.dumping.old_dumps import why_superseded
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.lifecycle.run.options import read_options
from trainckpt.process_dump import restore
from trainckpt.snapshot import catalog, memory_copies
from trainckpt.snapshot import verify as verifying
from trainckpt.snapshot.opened import Opener
from trainckpt.snapshot.verify import Copy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    from trainckpt.format.files import FileEntry
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.tiers.base import Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]")


def execute(arguments: argparse.Namespace) -> int:
    """Check every committed snapshot in every tier, or one; 65 if any copy is bad."""
    run, wanted = split_target(arguments.target)
    everywhere = open_everywhere(run)
    dump = DumpName.parse(wanted or "")
    candidates = everywhere.candidates() if dump is None else ()
    copies = _check(everywhere, _named(everywhere, candidates, wanted)) if dump is None else []
    copies += _check_dumps(everywhere, dump) if dump is not None or not wanted else []
    copies += _lost(everywhere, candidates) if not wanted else []
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


def _named(everywhere: Everywhere, candidates: Sequence[Candidate], wanted: str | None) -> set[str]:
    chosen = (catalog.find(candidates, wanted, everywhere.place.url),) if wanted else candidates
    return {str(c.name) for c in chosen if wanted or c.reason != catalog.NOT_COMMITTED}


def _lost(everywhere: Everywhere, candidates: Sequence[Candidate]) -> list[Copy]:
    """The newest commit that an attempt has recorded, if no tier has it, or a newer one, any more.

    Where a tier does not answer it may be there.
    """
    told = (SnapshotName.parse(r.newest_commit or "") for r in everywhere.records.values())
    newest = max((name for name in told if name is not None), default=None)
    there = [c.name for c in candidates if c.reason != catalog.NOT_COMMITTED]
    if newest is None or everywhere.silent or any(name >= newest for name in there):
        return []
    why = f"attempt {newest.attempt} has committed it, and it is not there"
    return [Copy(str(newest), everywhere.tiers[0].name, MANIFEST, ok=False, reason=why)]


def _check_dumps(everywhere: Everywhere, wanted: DumpName | None) -> list[Copy]:
    """Every image of the dump that is named, or of those that a resume may go on from."""
    found: list[Copy] = []
    for tier in everywhere.tiers:
        for name in restore.names_in(tier):
            if wanted == name or (wanted is None and not why_superseded(name, everywhere.records)):
                found += _check_dump(everywhere, tier, name)
    if wanted is not None and not found:
        raise UnusableSnapshot(f"there is no {wanted}", hint="trainckpt list RUN")
    return found


def _check_dump(everywhere: Everywhere, tier: Tier, name: DumpName) -> list[Copy]:
    def copy(file: str, why: str) -> Copy:
        return Copy(str(name), tier.name, file, ok=not why, reason=why)

    try:
        record = restore.load(tier, everywhere.run, name)
    except UnusableSnapshot as error:
        return [copy(RECORD, error.message)]
    images = [(i.name, dump_copies.check(tier, name.image(i.name), i)) for i in record.images]
    return [copy(RECORD, ""), *(copy(file, why) for file, why in images)]


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
    with show.progress() as progress:
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
