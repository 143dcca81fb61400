"""prune: delete the checkpoints that the retention policy no longer keeps, and dead files.

Among them images of process dumps that no resume brings back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.cli import show
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import names
from trainckpt.format.attempt import UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.dumping.old_dumps import old_dumps, remove, why_superseded
from trainckpt.lifecycle.places import place as places
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.lifecycle.resuming.choice import KEEP_LAST, READING
from trainckpt.lifecycle.run import heartbeat
from trainckpt.lifecycle.run.options import read_options
from trainckpt.process_dump import restore
from trainckpt.snapshot import attempts, catalog, prune, sweep
from trainckpt.tiers import memory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier
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
    parser.add_argument(
        "--tier", metavar="TIER", help="in this one alone, by its name or URL; else in all of them"
    )
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, only say what")


def execute(arguments: argparse.Namespace) -> int:
    """Plan, delete, and say what went, where, why, and how many bytes that freed."""
    place = places.open_place(arguments.run)
    newest = attempts.newest(place)
    everywhere = open_everywhere(arguments.run)
    live = _live(place, everywhere.records)
    policy = _Policy(
        arguments.keep_last or _keep_last(everywhere.records), live,
        abandoned=arguments.abandoned and all(r.parent != UNDECIDED for r in live.values()),
    )  # fmt: skip
    notes = [_WAITS] if arguments.abandoned and not policy.abandoned else []
    rows: list[dict[str, Any]] = []
    kept: dict[str, None] = {}
    for tier in _tiers(everywhere, arguments.tier):
        own, stay, is_whole = _prune(everywhere, tier, policy, newest, dry_run=arguments.dry_run)
        rows += own
        kept |= dict.fromkeys(stay)
        notes += [] if is_whole else [_INTERRUPTED]
    if not arguments.dry_run and not live and everywhere.place in everywhere.tiers:
        place.clear_spares()
        notes += _give_back_memory(place, everywhere)
    silent = {} if arguments.tier else everywhere.silent
    notes += [f"the tier {name} stays as it is: {why}" for name, why in silent.items()]
    _tell(arguments, place, policy.keep_last, rows, list(kept), notes)
    return TierUnavailable.exit_code if silent else 0


_WAITS = "abandoned branches stay: a live attempt has not chosen yet what it begins from"
_INTERRUPTED = "a new attempt began meanwhile, so the rest stays; run the same command again"


@dataclass(frozen=True)
class _Policy:
    """What is kept in each tier, and what nobody may touch now."""

    keep_last: int
    live: Mapping[int, AttemptRecord]
    abandoned: bool


def _tiers(everywhere: Everywhere, wanted: str | None) -> Sequence[Tier]:
    """Those that hold the run, or the one that is named."""
    return everywhere.tiers if wanted is None else [everywhere.holding(wanted)]


def _prune(
    everywhere: Everywhere, tier: Tier, policy: _Policy, newest: int, *, dry_run: bool
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """One tier: what went, what stays, and whether that is all of it."""
    candidates = catalog.read_catalog(tier, everywhere.run, everywhere.records)
    doomed = sweep.plan_sweep(
        candidates, keep_last=policy.keep_last, live=policy.live, keep=_begun_from(policy.live),
        abandoned=policy.abandoned,
    )  # fmt: skip
    if policy.live and tier is not everywhere.place:  # it may be copying what another one has left
        doomed = tuple(one for one in doomed if one.reason != sweep.GARBAGE)
    kept_files = prune.kept_files(tier, candidates, [one.name for one in doomed])
    left = [sweep.Doomed(name, sweep.UNREACHED) for name in prune.left_folders(candidates)]
    rows = [_row(tier, one, kept_files) for one in doomed]
    rows += [row for row in (_row(tier, one, kept_files) for one in left) if row["bytes"]]
    done = len(rows)
    if not dry_run:
        done = _delete(everywhere.place, tier, rows, kept_files, newest)
    gone = {row["name"] for row in rows[:done]}
    kept = [str(c.name) for c in candidates if str(c.name) not in gone]
    is_whole, rows = done == len(rows), rows[:done]
    if is_whole:
        rows += _prune_dumps(everywhere, tier, dry_run=dry_run)
    return rows, kept, is_whole


def _prune_dumps(everywhere: Everywhere, tier: Tier, *, dry_run: bool) -> list[dict[str, Any]]:
    """Images that no resume brings back."""
    is_copy = tier is not everywhere.place
    old = old_dumps(tier, everywhere.records, is_copy=is_copy)
    for dump in old if not dry_run else ():
        remove(tier, dump, is_copy=is_copy)
    return [
        {"name": str(d.name), "tier": tier.name, "reason": d.reason, "bytes": d.num_bytes}
        for d in old
    ]


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


def _row(tier: Tier, doomed: sweep.Doomed, kept: frozenset[str]) -> dict[str, Any]:
    """What goes: files that another checkpoint refers to stay."""
    folder, stay = doomed.name.folder, prune.files_in(doomed.name, kept)
    sizes = (tier.size(f"{folder}/{name}") for name in tier.list(folder) if name not in stay)
    return {
        "name": str(doomed.name),
        "tier": tier.name,
        "reason": doomed.reason,
        "bytes": sum(size or 0 for size in sizes),
    }


def _delete(
    place: Tier, tier: Tier, rows: list[dict[str, Any]], kept: frozenset[str], newest: int
) -> int:
    """One by one, until a new attempt begins: it decides anew what is needed. How many went."""
    for done, row in enumerate(rows):
        name = SnapshotName.parse(row["name"])
        if name is None or attempts.newest(place) != newest:
            return done
        prune.prune(tier, [name], kept)
    return len(rows)


def _give_back_memory(tier: Place, everywhere: Everywhere) -> list[str]:
    """What attempts that are over hold of this host's memory; a note if there was any."""
    memory.reclaim()
    held = memory.MemoryPlace.found(tier.url)
    if held is None or held.is_in_use:
        return []
    freed = held.num_bytes
    if freed and (dump := _dump_in(held, tier, everywhere)):
        return [f"{show.size(freed)} of this host's memory stay: the processes of {dump} have it"]
    held.remove()
    return [f"{show.size(freed)} of this host's memory were given back"] if freed else []


def _dump_in(held: memory.MemoryPlace, tier: Place, everywhere: Everywhere) -> str:
    """The dump that may be brought back and has files of this memory open, or ""."""
    for name in restore.names_in(tier):
        if why_superseded(name, everywhere.records):
            continue
        with contextlib.suppress(UnusableSnapshot):
            written = restore.load(tier, everywhere.run, name).written
            if any(Path(file.path).is_relative_to(held.root) for file in written):
                return str(name)
    return ""


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
        told = [(r["name"], r["tier"], show.size(r["bytes"]), r["reason"]) for r in rows]
        show.table(("snapshot", "tier", "size", "why"), told, title=tier.url)
    verb = "would go" if arguments.dry_run else "deleted"
    print(f"{len(rows)} {verb}, {len(kept)} stay; {show.size(freed)} freed")
    for note in notes:
        print(note)
