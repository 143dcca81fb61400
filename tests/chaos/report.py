"""One JSON line a case, and the table of faults and rooms that all lines of a file amount to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.campaign.launch import library_commit
from tests.chaos.faults import CATALOGUE
from tests.chaos.judge import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.chaos.drive import Case, Ended

GROUPS = (  # the table's columns, by what they tell of a room
    ("none", "ddp", "fsdp", "hsdp", "tp"),
    ("plain", "lightning", "accelerate", "accelerate split batches", "transformers"),
    ("local", "disk", "tmpfs-poor", "disk without links", "late file server"),
    ("s3", "s3 tier"),
    ("2 hosts", "3 hosts", "4 hosts", "partner", "xor:4", "rs:2+2"),
    ("survivors", "encrypted", "bf16", "workers", "trainckpt run", "dumps"),
    ("save every step", "save few", "save never"),
)


def line_of(case: Case, attempts: list[Ended], verdict: str, why: str) -> dict[str, Any]:
    """What is kept of one case."""
    return {
        "commit": library_commit(),
        "seed": case.seed,
        "room": case.room.words,
        "rooms": case.room.rooms,
        "faults": [
            {"fault": name, "where": where, "attempt": number, "trained": trained}
            for number, ended in enumerate(attempts, 1)
            for name, where, trained in ended.hits
        ],
        "dumped": sum(ended.log.count("dumped as dump~") for ended in attempts),
        "restored": sum(ended.log.count(": restored dump~") for ended in attempts),
        "missed": len(case.shots) - sum(len(ended.hits) for ended in attempts),
        "codes": [ended.codes for ended in attempts],
        "verdict": verdict,
        "why": why,
        "seconds": round(sum(ended.seconds for ended in attempts), 1),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Faults by rooms, with the number of cases in each cell; verdicts at its end."""
    return "\n\n".join([*(_part(lines, group) for group in GROUPS), _verdicts(lines)])


def _part(lines: list[dict[str, Any]], columns: Iterable[str]) -> str:
    counts = Counter(
        (fault, room) for line in lines for fault in _faults(line) for room in line["rooms"]
    )
    totals = Counter(fault for line in lines for fault in _faults(line))
    rooms = Counter(room for line in lines for room in line["rooms"])
    rows = [["", "all", *columns], ["cases", len(lines), *(rooms[c] for c in columns)]]
    rows += [[f, totals[f], *(counts[f, c] or "." for c in columns)] for f in CATALOGUE]
    widths = [max(len(str(row[n])) for row in rows) + 2 for n in range(len(rows[0]))]
    return "\n".join(_row(row, widths) for row in rows)


def _row(cells: list[Any], widths: list[int]) -> str:
    name, *counts = [str(cell) for cell in cells]
    shown = (count.rjust(width) for count, width in zip(counts, widths[1:], strict=True))
    return name.ljust(widths[0]) + "".join(shown)


def _faults(line: dict[str, Any]) -> set[str]:
    return {hit["fault"] for hit in line["faults"]}


def _verdicts(lines: list[dict[str, Any]]) -> str:
    counts = Counter(line["verdict"] for line in lines)
    failed = [line["seed"] for line in lines if line["verdict"] == FAILED]
    hits = sum(len(line["faults"]) for line in lines)
    return "\n".join([*_counted(counts), f"{hits} faults in all", f"failed seeds: {failed}"])


def _counted(counts: Counter[str]) -> Iterator[str]:
    for verdict, number in counts.most_common():
        yield f"{number:5} {verdict}"
