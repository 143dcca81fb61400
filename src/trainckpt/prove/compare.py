"""Compare the records of an uninterrupted run with those of an interrupted one. Pure.

A record is one line a boundary (a digest of each part of the state) and one line a batch, written
by each rank (lifecycle/recorder.py). The resumed attempts must repeat the straight run's lines
from wherever they went on, and together cover all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.prove.naming import blame_order, say

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

Key = tuple[int, int, str]  # micro-batches trained, evaluation, "state" or "batch"
Record = dict[Key, dict[str, Any]]
START: Key = (0, 0, "state")


@dataclass(frozen=True)
class Difference:
    """Where two runs differ first, and in what.

    Attributes:
        rank: The rank on which it shows.
        at: Micro-batches that the rank had trained.
        step, micro: The same place as step and micro-batch of its window.
        parts: What differs there, causes before effects, as people say it.
    """

    rank: int
    at: int
    step: int
    micro: int
    parts: tuple[str, ...]

    def __str__(self) -> str:
        others = f" (and {len(self.parts) - 1} other parts)" if len(self.parts) > 1 else ""
        place = f"step {self.step} micro-batch {self.micro} on rank {self.rank}"
        return f"differs first at {place}: {self.parts[0]}{others}"


def read_records(folder: Path) -> dict[int, Record]:
    """Rank -> its lines by key. A line cut short by a kill is left out."""
    found = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        record: Record = {}
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            entry = json.loads(line)
            kind = "batch" if "batch" in entry else "state"
            evaluation = entry.get("cursor", {}).get("evaluations", 0)
            record[entry["at"], evaluation, kind] = entry
        found[int(path.stem.removeprefix("rank"))] = record
    return found


def unseeded(straight: Mapping[int, Record], first: Mapping[int, Record]) -> frozenset[str]:
    """Random generators that the script never seeded: they differ before anything was trained.

    They are left out of the comparison. If anything is drawn from them, what it makes differs.
    """
    found: set[str] = set()
    for rank, record in first.items():
        mine, theirs = record.get(START), straight.get(rank, {}).get(START)
        if mine and theirs:
            found |= {p for p in mine["parts"] if mine["parts"][p] != theirs["parts"].get(p)}
    return frozenset(part for part in found if part.startswith(("rng.", "rng/")))


def first_difference(
    straight: Mapping[int, Record],
    attempts: Sequence[Mapping[int, Record]],
    leave_out: frozenset[str] = frozenset(),
) -> Difference | None:
    """The earliest place where any attempt differs from the straight run, or None."""
    ignored = leave_out | {part.replace("rng.", "loader.rng_before.") for part in leave_out}
    found = [
        difference
        for attempt in attempts
        for rank, record in attempt.items()
        for difference in _differences(rank, straight.get(rank, {}), record, ignored)
    ]
    found += list(_uncovered(straight, attempts))
    return min(found, key=lambda d: (d.at, _severity(d), d.rank), default=None)


def boundaries(straight: Mapping[int, Record]) -> list[dict[str, Any]]:
    """Rank 0's training boundaries, in order: the cursor at each."""
    record = straight.get(0, {})
    keys = sorted(key for key in record if key[2] == "state" and key[1] == 0)
    return [record[key]["cursor"] for key in keys]


def _differences(
    rank: int, straight: Record, record: Record, ignored: Collection[str]
) -> Iterable[Difference]:
    for key in sorted(record, key=lambda k: (k[0], k[1], k[2] == "batch")):
        entry, other = record[key], straight.get(key)
        if other is None:
            yield _at(rank, key, entry, straight, ("a micro-batch the straight run does not have",))
            return
        parts = _parts(entry, other, ignored)
        if parts:
            yield _at(rank, key, entry, straight, parts)
            return


def _parts(
    entry: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str]
) -> tuple[str, ...]:
    if "batch" in entry:
        same = entry["batch"] == other["batch"]
        return () if same else ("the batch: other samples, or other randomness in the loader",)
    mine, theirs = entry["parts"], other["parts"]
    both = (mine.keys() | theirs.keys()) - set(ignored)
    names = [name for name in both if mine.get(name) != theirs.get(name)]
    said = dict.fromkeys(say(name) for name in sorted(names, key=blame_order))
    if not said and entry["cursor"] != other["cursor"]:
        return (f"the cursor: {entry['cursor']} instead of {other['cursor']}",)
    return tuple(said)


def _uncovered(
    straight: Mapping[int, Record], attempts: Sequence[Mapping[int, Record]]
) -> Iterable[Difference]:
    for rank, record in straight.items():
        seen = set().union(*(attempt.get(rank, {}).keys() for attempt in attempts))
        missing = sorted(record.keys() - seen)
        if missing:
            what = ("a micro-batch that no attempt trained",)
            yield _at(rank, missing[0], record[missing[0]], record, what)


def _at(
    rank: int, key: Key, entry: Mapping[str, Any], straight: Record, parts: tuple[str, ...]
) -> Difference:
    state = straight.get((key[0], key[1], "state"), entry)
    cursor = state.get("cursor") or entry.get("cursor") or {"step": -1, "micro": -1}
    return Difference(rank, key[0], cursor["step"], cursor["micro"], parts)


def _severity(difference: Difference) -> int:
    return int(difference.parts[0].startswith("the batch"))
