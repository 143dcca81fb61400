"""prune: delete checkpoints beyond the retention policy, and leftover files.

Among them images of process dumps that no resume brings back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.options import read_options
from trainckpt.cli import output
from trainckpt.dumping import old_dumps
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import names
from trainckpt.format.attempt_record import UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.process_dump import restore
from trainckpt.resume.candidate_order import KEEP_LAST, READING
from trainckpt.run_directory import run_tiers, run_url
from trainckpt.snapshot import attempt_history, catalog, prune
from trainckpt.storage import shared_memory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.storage.base import RunTier, Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument(
        "--keep-last",
        type=output.count,
        metavar="N",
        help="usable snapshots to keep, besides tagged ones (default: as the run itself)",
    )
    parser.add_argument(
        "--abandoned",
        action="store_true",
        help="also delete abandoned branches, used by resumes only by name",
    )
    parser.add_argument(
        "--tier", metavar="TIER", help="prune this tier alone, by name or URL (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the list, delete nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Plan, delete, and say what went, where, why, and how many bytes that freed."""
    run_tier = run_url.open_run_tier(arguments.run)
    newest = attempt_history.newest(run_tier)
    everywhere = run_tiers.open_everywhere(arguments.run)
    live = _live(run_tier, everywhere.records)
    policy = _Policy(
        arguments.keep_last or _keep_last(everywhere.records),
        live,
        abandoned=arguments.abandoned and all(r.parent != UNDECIDED for r in live.values()),
    )
    notes = [_WAITS] if arguments.abandoned and not policy.abandoned else []
    rows: list[dict[str, Any]] = []
    kept: dict[str, None] = {}
    tiers = [everywhere.holding(arguments.tier)] if arguments.tier else everywhere.tiers
    for tier in tiers:
        tier_rows, kept_here, is_whole = _prune(
            everywhere, tier, policy, newest, dry_run=arguments.dry_run
        )
        rows += tier_rows
        kept |= dict.fromkeys(kept_here)
        notes += [] if is_whole else [_INTERRUPTED]
    if not arguments.dry_run and not live and everywhere.run_tier in everywhere.tiers:
        notes += _give_back_memory(run_tier, everywhere)
    silent = {} if arguments.tier else everywhere.silent
    notes += [f"tier {name} was not pruned: {reason}" for name, reason in silent.items()]
    freed = sum(row["bytes"] for row in rows)
    if arguments.json:
        document = {
            "run": run_tier.url,
            "keep_last": policy.keep_last,
            "dry_run": arguments.dry_run,
        }
        document |= {"pruned": rows, "kept": list(kept), "bytes": freed, "notes": notes}
        output.document(document)
    else:
        if rows:
            cells = [(r["name"], r["tier"], output.size(r["bytes"]), r["reason"]) for r in rows]
            output.table(("snapshot", "tier", "size", "why"), cells, title=run_tier.url)
        verb = "would go" if arguments.dry_run else "deleted"
        print(f"{len(rows)} {verb}, {len(kept)} stay; {output.size(freed)} freed", *notes, sep="\n")
    return TierUnavailable.exit_code if silent else 0


_WAITS = "abandoned branches stay: a live attempt has not chosen its snapshot yet"
_INTERRUPTED = "a new attempt began meanwhile, so the rest stays; run the same command again"


@dataclass(frozen=True)
class _Policy:
    """Checkpoints that a tier keeps, and those that must not be touched now."""

    keep_last: int
    live: Mapping[int, AttemptRecord]
    abandoned: bool


def _prune(
    everywhere: RunTiers, tier: Tier, policy: _Policy, newest: int, *, dry_run: bool
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """One tier: what went, what stays, and whether that is all of it."""
    candidates = catalog.read_catalog(tier, everywhere.run, everywhere.records)
    doomed = prune.plan_sweep(
        candidates,
        keep_last=policy.keep_last,
        live=policy.live,
        keep=_begun_from(policy.live),
        abandoned=policy.abandoned,
    )
    if (
        policy.live and tier is not everywhere.run_tier
    ):  # it may be copying what another one has left
        doomed = tuple(one for one in doomed if one.reason != prune.GARBAGE)
    kept_files = prune.kept_files(tier, candidates, [candidate.name for candidate in doomed])
    rows = [_row(tier, candidate, kept_files) for candidate in doomed]
    left_folders = prune.left_folders(candidates)
    leftovers = [prune.SweepCandidates(name, prune.UNREACHED) for name in left_folders]
    rows += [row for one in leftovers if (row := _row(tier, one, kept_files))["bytes"]]
    deleted = rows if dry_run else _delete(everywhere.run_tier, tier, rows, kept_files, newest)
    deleted_names = {row["name"] for row in deleted}
    kept = [str(c.name) for c in candidates if str(c.name) not in deleted_names]
    is_whole, rows = len(deleted) == len(rows), deleted
    if is_whole:
        rows += (
            _prune_dumps(everywhere, tier, dry_run=dry_run) if tier is everywhere.run_tier else []
        )
    return rows, kept, is_whole


def _prune_dumps(everywhere: RunTiers, tier: Tier, *, dry_run: bool) -> list[dict[str, Any]]:
    """Delete images that no resume restores."""
    outdated = old_dumps.old_dumps(tier, everywhere.records)
    for dump in outdated if not dry_run else ():
        old_dumps.remove(tier, dump)
    return [
        {"name": str(d.name), "tier": tier.name, "reason": d.reason, "bytes": d.num_bytes}
        for d in outdated
    ]


def _live(tier: RunTier, records: Mapping[int, AttemptRecord]) -> dict[int, AttemptRecord]:
    """Attempts that gave a sign of life in the last 15 s; most have no heartbeat to look at."""
    files = set(tier.list(names.ATTEMPTS))
    return {
        number: record
        for number, record in records.items()
        if f"{number}{heartbeat.SUFFIX}" in files and heartbeat.attempt_is_alive(tier, number)
    }


def _keep_last(records: Mapping[int, AttemptRecord]) -> int:
    """Return the retention that the newest attempt recorded, else the option's value here."""
    for _, record in sorted(records.items(), reverse=True):
        recorded = record.facts.get(KEEP_LAST)
        if type(recorded) is int and recorded > 0:
            return recorded
    return read_options({}).keep_last


def _begun_from(live: Mapping[int, AttemptRecord]) -> set[str]:
    """Snapshots that a live attempt may be reading now."""
    name_pairs = [(record.parent, record.facts.get(READING)) for record in live.values()]
    return {name for pair in name_pairs for name in pair if isinstance(name, str)}


def _row(tier: Tier, doomed: prune.SweepCandidates, kept: frozenset[str]) -> dict[str, Any]:
    """Return the files to delete; files that another checkpoint refers to stay."""
    folder, kept_names = doomed.name.folder, prune.files_in(doomed.name, kept)
    num_bytes = 0
    for name in tier.list(folder):
        with contextlib.suppress(UnusableSnapshot):  # not a file
            num_bytes += (tier.size(f"{folder}/{name}") or 0) if name not in kept_names else 0
    return {
        "name": str(doomed.name),
        "tier": tier.name,
        "reason": doomed.reason,
        "bytes": num_bytes,
    }


def _delete(
    run_tier: Tier, tier: Tier, rows: list[dict[str, Any]], kept: frozenset[str], newest: int
) -> list[dict[str, Any]]:
    """Delete one by one until a new attempt begins, which decides anew; return what went."""
    for num_deleted, row in enumerate(rows):
        name = SnapshotName.parse(row["name"])
        if name is None or attempt_history.newest(run_tier) != newest:
            return rows[:num_deleted]
        prune.prune(tier, [name], kept)
    return rows


def _give_back_memory(tier: RunTier, everywhere: RunTiers) -> list[str]:
    """Free the host memory of attempts that are over; return a note if there was any."""
    shared_memory.reclaim()
    memory = shared_memory.SharedMemoryDir.found(tier.url)
    if memory is None or memory.is_in_use:
        return []
    freed = memory.num_bytes
    if freed and (dump := _dump_in(memory, tier, everywhere)):
        return [f"{output.size(freed)} of this host's memory stay: the processes of {dump} have it"]
    memory.remove()
    return [f"{output.size(freed)} of this host's memory were given back"] if freed else []


def _dump_in(held: shared_memory.SharedMemoryDir, tier: RunTier, everywhere: RunTiers) -> str:
    """Return the restorable dump with files of this memory open, or ""."""
    for name in restore.names_in(tier):
        if old_dumps.why_superseded(name, everywhere.records):
            continue
        with contextlib.suppress(UnusableSnapshot):
            written_files = restore.load(tier, everywhere.run, name).written
            if any(Path(file.path).is_relative_to(held.root) for file in written_files):
                return str(name)
    return ""
