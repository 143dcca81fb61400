"""prune: delete the checkpoints that the retention policy no longer keeps, and dead files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.cli import show
from trainckpt.format import names
from trainckpt.format.attempt import UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle import heartbeat, place, source
from trainckpt.lifecycle.choice import KEEP_LAST, READING
from trainckpt.lifecycle.options import read_options
from trainckpt.snapshot import attempts, prune, sweep
from trainckpt.tiers import memory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.places import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--keep-last", type=show.count, metavar="N",
        help="usable snapshots to keep, beside the tagged ones; else as many as the run itself",
    )  # fmt: skip
    parser.add_argument(
        "--abandoned", action="store_true",
        help="abandoned branches too: what no resume takes unless it is named",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, only say what")


def execute(arguments: argparse.Namespace) -> int:
    """Plan, delete, and say what went, why, and how many bytes that freed."""
    tier = place.open_place(arguments.run)
    newest = attempts.newest(tier)
    records = attempts.read_attempts(tier)
    candidates = source.read_candidates(tier)
    live = _live(tier, records)
    waits = arguments.abandoned and any(r.parent == UNDECIDED for r in live.values())
    keep_last = arguments.keep_last or _keep_last(records)
    doomed = sweep.plan_sweep(
        candidates,
        keep_last=keep_last,
        live=live,
        keep=_begun_from(live),
        abandoned=arguments.abandoned and not waits,
    )
    kept_files = prune.kept_files(tier, candidates, [one.name for one in doomed])
    left = [sweep.Doomed(name, sweep.UNREACHED) for name in prune.left_folders(candidates)]
    rows = [_row(tier, one, kept_files) for one in doomed]
    rows += [row for row in (_row(tier, one, kept_files) for one in left) if row["bytes"]]
    notes = [_WAITS] if waits else []
    if not arguments.dry_run:
        done = _delete(tier, rows, kept_files, newest)
        notes += [_INTERRUPTED] if done < len(rows) else []
        rows = rows[:done]
        if not live:
            tier.clear_spares()
            notes += _give_back_memory(tier)
    gone = {row["name"] for row in rows}
    kept = [str(c.name) for c in candidates if str(c.name) not in gone]
    _tell(arguments, tier, keep_last, rows, kept, notes)
    return 0


_WAITS = "abandoned branches stay: a live attempt has not chosen yet what it begins from"
_INTERRUPTED = "a new attempt began meanwhile, so the rest stays; run the same command again"


def _live(tier: Place, records: Mapping[int, AttemptRecord]) -> dict[int, AttemptRecord]:
    """Attempts that gave a sign of life in the last 15 s; most have no heartbeat to look at."""
    there = set(tier.list(names.ATTEMPTS))
    beating = {n: r for n, r in records.items() if f"{n}{heartbeat.SUFFIX}" in there}
    return {n: record for n, record in beating.items() if heartbeat.is_alive(tier, n)}


def _keep_last(records: Mapping[int, AttemptRecord]) -> int:
    """What the newest attempt that said so keeps; else the option, as it is here and now."""
    for _, record in sorted(records.items(), reverse=True):
        said = record.facts.get(KEEP_LAST)
        if type(said) is int and said > 0:
            return said
    return read_options({}).keep_last


def _begun_from(live: Mapping[int, AttemptRecord]) -> set[str]:
    """Snapshots that a live attempt may be reading now."""
    named = [(record.parent, record.facts.get(READING)) for record in live.values()]
    return {name for pair in named for name in pair if isinstance(name, str)}


def _row(tier: Place, doomed: sweep.Doomed, kept: frozenset[str]) -> dict[str, Any]:
    """What goes: files that another checkpoint refers to stay."""
    folder, stay = doomed.name.folder, prune.files_in(doomed.name, kept)
    sizes = (tier.size(f"{folder}/{name}") for name in tier.list(folder) if name not in stay)
    return {
        "name": str(doomed.name),
        "reason": doomed.reason,
        "bytes": sum(size or 0 for size in sizes),
    }


def _delete(tier: Place, rows: list[dict[str, Any]], kept: frozenset[str], newest: int) -> int:
    """One by one, until a new attempt begins: it decides anew what is needed. How many went."""
    for done, row in enumerate(rows):
        name = SnapshotName.parse(row["name"])
        if name is None or attempts.newest(tier) != newest:
            return done
        prune.prune(tier, [name], kept)
    return len(rows)


def _give_back_memory(tier: Place) -> list[str]:
    """What attempts that are over hold of this host's memory; a note if there was any."""
    memory.reclaim()
    held = memory.MemoryPlace.found(tier.url)
    if held is None or held.is_in_use:
        return []
    freed = held.num_bytes
    held.remove()
    return [f"{show.size(freed)} of this host's memory were given back"] if freed else []


def _tell(
    arguments: argparse.Namespace,
    tier: Place,
    keep_last: int,
    rows: list[dict[str, Any]],
    kept: list[str],
    notes: list[str],
) -> None:
    freed = sum(row["bytes"] for row in rows)
    if arguments.json:
        show.document(
            {
                "run": tier.url,
                "keep_last": keep_last,
                "dry_run": arguments.dry_run,
                "pruned": rows,
                "kept": kept,
                "bytes": freed,
                "notes": notes,
            }
        )
        return
    if rows:
        told = [(row["name"], show.size(row["bytes"]), row["reason"]) for row in rows]
        show.table(("snapshot", "size", "why"), told, title=tier.url)
    verb = "would go" if arguments.dry_run else "deleted"
    print(f"{len(rows)} {verb}, {len(kept)} stay; {show.size(freed)} freed")
    for note in notes:
        print(note)
