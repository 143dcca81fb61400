"""Parse and dump the history of one attempt's saves, as its record holds it under `saves`.

A run may save at every step for weeks, and its record is rewritten at each commit. So the history
has at most `MOST_ROWS` rows: beyond that, neighbours are merged, the shortest stretch first. A row
of several saves keeps the slowest of each stage and the largest size, since these are what a reader
looks for. The totals count every save.

In JSON the rows are columns: few containers, and little text. A reader skips what cannot be, since
records may be written by other releases or by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainckpt.format.attempt_times import NAME_LENGTH, count_of
from trainckpt.format.duration import MOST_S
from trainckpt.format.names import SnapshotName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAVES = "saves"  # key of an attempt's record
MOST_ROWS = 100
MOST_TIERS = 16
MOST_NOT_SAVED = 20
LONGEST = 500  # characters of a reason

SKIPPED, FAILED, NOT_COPIED = "skipped", "failed", "not copied"  # `NotKept.how`


@dataclass(frozen=True, kw_only=True)
class SaveRow:
    """One committed save, or several neighbours.

    Attributes:
        snapshot: Full name, of the newest.
        at: Its boundary, in seconds since the Unix epoch.
        count: Saves in this row. The rest are the slowest and largest of them.
        stall_s: Training waited so long, for the save before as well; None: unknown.
        memory_s: From the boundary until all was in shared memory; None: it was not.
        local_s: From the boundary to the commit in the run directory.
        copies: Tier -> seconds from the boundary until the snapshot was there.
        num_bytes, reached_bytes: Of its own files, and of the older files that it refers to.
    """

    snapshot: str
    at: float
    count: int = 1
    stall_s: float | None = None
    memory_s: float | None = None
    local_s: float | None = None
    copies: Mapping[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    reached_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class NotKept:
    """A save without a snapshot, or a snapshot that did not reach a tier.

    Attributes:
        snapshot: Its full name.
        how: `SKIPPED`, `FAILED`, or `NOT_COPIED`: then `tier` names the tier.
        reason: The reason.
        when: Seconds since the Unix epoch.
    """

    snapshot: str = ""
    how: str = ""
    reason: str = ""
    when: float = 0.0
    tier: str = ""


@dataclass(frozen=True, kw_only=True)
class SaveHistory:
    """The saves of one attempt.

    Attributes:
        rows: Committed saves, oldest first.
        not_kept: The last ones, oldest first.
        committed, in_memory, skipped, failed, not_copied: Number of all.
        num_bytes: Written by all committed saves.
    """

    rows: tuple[SaveRow, ...] = ()
    not_kept: tuple[NotKept, ...] = ()
    committed: int = 0
    in_memory: int = 0
    skipped: int = 0
    failed: int = 0
    not_copied: int = 0
    num_bytes: int = 0


TOTALS = ("committed", "in_memory", "skipped", "failed", "not_copied", "num_bytes")
_STAGES = ("stall_s", "memory_s", "local_s")
_SIZES = ("num_bytes", "reached_bytes")


def merge(earlier: SaveRow, later: SaveRow) -> SaveRow:
    """Return one row for two neighbours."""
    stages = {name: _slower(getattr(earlier, name), getattr(later, name)) for name in _STAGES}
    tiers = [*earlier.copies, *(tier for tier in later.copies if tier not in earlier.copies)]
    copies = {
        tier: max(row.copies[tier] for row in (earlier, later) if tier in row.copies)
        for tier in tiers[:MOST_TIERS]
    }
    return SaveRow(
        snapshot=later.snapshot,
        at=later.at,
        count=earlier.count + later.count,
        copies=copies,
        num_bytes=max(earlier.num_bytes, later.num_bytes),
        reached_bytes=max(earlier.reached_bytes, later.reached_bytes),
        **stages,
    )


def thin(rows: list[SaveRow], most: int = MOST_ROWS) -> None:
    """Merge neighbours, the shortest stretch first, until at most `most` rows are left.

    Each of these merges looks at all pairs. So many rows are packed first, in one pass, into
    stretches of at most an equal share of the saves.
    """
    if len(rows) > 2 * most:
        share = sum(row.count for row in rows) / most
        packed = rows[:1]
        for row in rows[1:]:
            if packed[-1].count + row.count <= share:
                packed[-1] = merge(packed[-1], row)
            else:
                packed.append(row)
        rows[:] = packed
    while len(rows) > most:
        counts = [one.count + other.count for one, other in pairwise(rows)]
        at = counts.index(min(counts))
        rows[at : at + 2] = [merge(rows[at], rows[at + 1])]


def dump_history(history: SaveHistory) -> dict[str, Any]:
    """Return the value for the record, rounded to 0.1 ms."""
    rows = history.rows
    body: dict[str, Any] = {name: getattr(history, name) for name in TOTALS}
    columns: dict[str, Any] = {
        "snapshot": [row.snapshot for row in rows],
        "at": [round(row.at, 3) for row in rows],
        "count": [row.count for row in rows],
    }
    for name in _STAGES:
        columns[name] = [_rounded(getattr(row, name)) for row in rows]
    for name in _SIZES:
        columns[name] = [getattr(row, name) for row in rows]
    tiers = sorted({tier for row in rows for tier in row.copies})
    columns["copies"] = {tier: [_rounded(row.copies.get(tier)) for row in rows] for tier in tiers}
    body["rows"] = columns
    body["not_kept"] = [
        [each.snapshot, each.how, each.tier, each.reason, round(each.when, 3)]
        for each in history.not_kept
    ]
    return body


def parse_history(body: object) -> SaveHistory | None:
    """Return the history in a record's value; None if it is none.

    Values that cannot be are left out.
    """
    if not isinstance(body, dict):
        return None
    columns, not_kept = body.get("rows"), body.get("not_kept")
    return SaveHistory(
        rows=_rows(columns) if isinstance(columns, dict) else (),
        not_kept=_parse_not_kept(not_kept if isinstance(not_kept, list) else []),
        **{name: count_of(body.get(name)) for name in TOTALS},
    )


def _rows(columns: dict[str, Any]) -> tuple[SaveRow, ...]:
    names = columns.get("snapshot")
    if not isinstance(names, list):
        return ()
    length = len(names)
    at, counts = _column(columns.get("at"), length), _column(columns.get("count"), length)
    stages = {name: _column(columns.get(name), length) for name in _STAGES}
    sizes = {name: _column(columns.get(name), length) for name in _SIZES}
    copies = columns.get("copies")
    by_tier = {
        str(tier)[:NAME_LENGTH]: _column(column, length)
        for tier, column in list(copies.items() if isinstance(copies, dict) else ())[:MOST_TIERS]
    }
    rows = []
    for index, snapshot in enumerate(names[: 10 * MOST_ROWS]):
        when = _seconds(at[index])
        if type(snapshot) is not str or SnapshotName.parse(snapshot) is None or when is None:
            continue
        arrived = {tier: _seconds(column[index]) for tier, column in by_tier.items()}
        rows.append(
            SaveRow(
                snapshot=snapshot,
                at=when,
                count=max(count_of(counts[index]), 1),
                copies={tier: took_s for tier, took_s in arrived.items() if took_s is not None},
                stall_s=_seconds(stages["stall_s"][index]),
                memory_s=_seconds(stages["memory_s"][index]),
                local_s=_seconds(stages["local_s"][index]),
                num_bytes=count_of(sizes["num_bytes"][index]),
                reached_bytes=count_of(sizes["reached_bytes"][index]),
            )
        )
    return tuple(sorted(rows, key=lambda row: row.at))


def _parse_not_kept(body: Sequence[Any]) -> tuple[NotKept, ...]:
    found = []
    for each in body[-MOST_NOT_SAVED:]:
        if not isinstance(each, list) or len(each) != 5 or _seconds(each[4]) is None:
            continue
        if any(type(text) is not str for text in each[:4]):
            continue
        snapshot, how, tier, reason, when = each
        if SnapshotName.parse(snapshot) is None or how not in (SKIPPED, FAILED, NOT_COPIED):
            continue
        found.append(
            NotKept(
                snapshot=snapshot,
                how=how,
                reason=reason[:LONGEST],
                when=float(when),
                tier=tier[:NAME_LENGTH],
            )
        )
    return tuple(found)


def _column(value: object, length: int) -> list[Any]:
    return value if isinstance(value, list) and len(value) == length else [None] * length


def _slower(one_s: float | None, other_s: float | None) -> float | None:
    known = [seconds for seconds in (one_s, other_s) if seconds is not None]
    return max(known, default=None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _seconds(value: object) -> float | None:
    """Return a number of seconds that can be; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        return None
    return float(value)
