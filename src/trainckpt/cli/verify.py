"""verify: read and check every byte of a run's checkpoints, naming each bad file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.options import read_options
from trainckpt.cli import output
from trainckpt.cli.dumps import dumps_of
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.dump import RECORD, DumpName
from trainckpt.format.names import MANIFEST, SnapshotName, split_target
from trainckpt.process_dump import restore
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import catalog, verify
from trainckpt.snapshot.decrypting_tier import KeyRing
from trainckpt.snapshot.verify import VerifiedCopy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Sequence

    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: all snapshots")


def execute(arguments: argparse.Namespace) -> int:
    """Check every committed snapshot in every tier, or one; 65 if any copy is bad."""
    run, target_name = split_target(arguments.target)
    everywhere = open_everywhere(run)
    dump = DumpName.parse(target_name or "")
    candidates = everywhere.candidates() if dump is None else ()
    copies = _check(everywhere, _named(everywhere, candidates, target_name)) if dump is None else []
    copies += _check_dumps(everywhere, dump) if dump is not None or not target_name else []
    copies += _lost(everywhere, candidates) if not target_name else []
    silent = [
        VerifiedCopy("", tier, "", ok=False, reason=f"does not answer: {reason}")
        for tier, reason in everywhere.silent.items()
    ]
    reported, num_bad = [*copies, *silent], sum(not copy.ok for copy in copies)
    if arguments.json:
        ok = all(copy.ok for copy in reported)
        output.document({"ok": ok, "copies": [asdict(copy) for copy in reported]})
    else:
        rows = [(c.snapshot, c.tier, c.file, "ok" if c.ok else c.reason) for c in reported]
        output.table(("snapshot", "tier", "file", "found"), rows, title=everywhere.run_tier.url)
        print(f"{len(copies)} files checked, {num_bad} bad")
    if num_bad:
        return UnusableSnapshot.exit_code
    return TierUnavailable.exit_code if silent else 0


def _named(everywhere: RunTiers, candidates: Sequence[Candidate], wanted: str | None) -> set[str]:
    chosen = (catalog.find(candidates, wanted, everywhere.run_tier.url),) if wanted else candidates
    return {str(c.name) for c in chosen if wanted or c.reason != catalog.NOT_COMMITTED}


def _lost(everywhere: RunTiers, candidates: Sequence[Candidate]) -> list[VerifiedCopy]:
    """Return the newest recorded commit, if no tier has it or a newer one any more.

    Where a tier does not answer it may be there.
    """
    commit_names = (SnapshotName.parse(r.newest_commit or "") for r in everywhere.records.values())
    newest = max((name for name in commit_names if name is not None), default=None)
    present_names = [c.name for c in candidates if c.reason != catalog.NOT_COMMITTED]
    if newest is None or everywhere.silent or any(name >= newest for name in present_names):
        return []
    reason = f"attempt {newest.attempt} committed it, but it is missing"
    return [VerifiedCopy(str(newest), everywhere.tiers[0].name, MANIFEST, ok=False, reason=reason)]


def _check_dumps(everywhere: RunTiers, wanted: DumpName | None) -> list[VerifiedCopy]:
    """Check every image of the dump called `wanted`, or of those that a resume may restore."""
    copies: list[VerifiedCopy] = []
    run_tier = everywhere.run_tier
    for dump in dumps_of(run_tier):
        if dump.name == wanted or (wanted is None and not dump.is_superseded):
            copies += _check_dump(run_tier, everywhere.run, dump.name)
    if wanted is not None and not copies:
        raise UnusableSnapshot(f"there is no {wanted}", hint="trainckpt list RUN")
    return copies


def _check_dump(run_tier: Tier, run: str, name: DumpName) -> list[VerifiedCopy]:
    reasons = {RECORD: ""}
    try:
        for image in restore.load(run_tier, run, name).images:
            path = Path(run_tier.url) / name.image(image.name)
            reasons[image.name] = restore.why_bad(path, image)
    except UnusableSnapshot as error:
        reasons = {RECORD: error.message}
    return [
        VerifiedCopy(str(name), run_tier.name, file, ok=not reason, reason=reason)
        for file, reason in reasons.items()
    ]


def _check(everywhere: RunTiers, names: Collection[str]) -> list[VerifiedCopy]:
    """Check every copy of these snapshots, tier by tier, and in this host's memory."""
    listed = [
        (tier, candidate)
        for tier in everywhere.tiers
        for candidate in catalog.read_catalog(tier, everywhere.run, everywhere.records)
        if str(candidate.name) in names and candidate.reason != catalog.NOT_COMMITTED
    ]
    num_bytes = {
        (tier.name, key): file.num_bytes
        for tier, candidate in listed
        if candidate.manifest is not None
        for key, file in verify.files_of(candidate.manifest)
    }
    copies: list[VerifiedCopy] = []
    results_by_tier: dict[str, dict[tuple[str, int, str, str], str]] = {}
    opener = KeyRing(read_options({}).identity)
    with output.progress() as progress:
        task = progress.add_task("reading", total=sum(num_bytes.values()))
        for tier, candidate in listed:
            if candidate.manifest is None:
                name, reason = str(candidate.name), candidate.reason
                copies.append(VerifiedCopy(name, tier.name, MANIFEST, ok=False, reason=reason))
                continue
            copies += verify.verify(
                tier,
                candidate.manifest,
                lambda n: progress.advance(task, n),
                results_by_tier.setdefault(tier.name, {}),
                opener,
            )
        manifests = {c.name: c.manifest for _, c in listed if c.manifest is not None}
        for manifest in manifests.values():
            copies += verify.verify_memory(everywhere.run_tier.url, manifest)
    return copies
