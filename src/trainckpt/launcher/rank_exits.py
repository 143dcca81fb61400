"""Exit records of the ranks, written by the agent into the supervisor's folder.

    ends.jsonl     one line as each child of the agent ends, in that order: {pid, code, at}
    failures.json  what torchrun itself found, at its end: [{rank, pid, code}, ...]

A code is negative for a signal, as in `subprocess`. torchrun alone does not say who ended first:
it looks ten times a second, and then ends the others.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.rank_status import parse_status
from trainckpt.storage.private_files import atomic_write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ENDS, FAILURES = "ends.jsonl", "failures.json"


@dataclass(frozen=True)
class RankExit:
    """One process that ended.

    Attributes:
        code: Exit code; negative for a signal.
        at: When (`time.time`); infinite where that was not seen.
        rank: Which rank it was, where that is known.
    """

    pid: int
    code: int
    at: float = math.inf
    rank: int | None = None


def write_end(folder: Path, end: RankExit) -> None:
    """Add one line; a folder that is gone stops nothing."""
    line = json.dumps({"pid": end.pid, "code": end.code, "at": end.at}) + "\n"
    with contextlib.suppress(OSError), (folder / ENDS).open("a", encoding="utf-8") as file:
        file.write(line)


def write_failures(folder: Path, failures: Iterable[Mapping[str, Any]]) -> None:
    """Write what torchrun found: rank, pid and code of each failed process."""
    with contextlib.suppress(OSError):
        atomic_write_json(folder / FAILURES, list(failures))


def read_ends(folder: Path) -> list[RankExit]:
    """Every end that was seen, first ones first; what only torchrun found comes last."""
    ends: dict[int, RankExit] = {}
    for body in _lines(folder / ENDS):
        if (end := parse_status(body, RankExit)) is not None:
            ends[end.pid] = end
    failures: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        failures = json.loads((folder / FAILURES).read_bytes())
    for body in failures if isinstance(failures, list) else []:
        if (failure := parse_status(body, RankExit)) is not None:
            ends[failure.pid] = replace(ends.get(failure.pid, failure), rank=failure.rank)
    return sorted(ends.values(), key=lambda end: end.at)


def _lines(path: Path) -> list[Any]:
    bodies = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                bodies.append(json.loads(line))
    return bodies
