"""How the ranks ended, as the agent writes it into the supervisor's folder.

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ENDS, FAILURES = "ends.jsonl", "failures.json"
MAX_NUMBER = 2**30  # of a process, a rank or an exit code; 128 more must still be a number


@dataclass(frozen=True)
class End:
    """One process that ended.

    Attributes:
        code: Exit code; negative for a signal.
        at: When (`time.time`); infinite where that was not seen.
        rank: Which rank it was, where that is known.
    """

    pid: int
    code: int
    at: float
    rank: int | None = None


def write_end(folder: Path, end: End) -> None:
    """Add one line; a folder that is gone stops nothing."""
    line = json.dumps({"pid": end.pid, "code": end.code, "at": end.at}) + "\n"
    with contextlib.suppress(OSError), (folder / ENDS).open("a", encoding="utf-8") as file:
        file.write(line)


def write_failures(folder: Path, failures: Iterable[Mapping[str, Any]]) -> None:
    """Write what torchrun found: rank, pid and code of each failed process."""
    with contextlib.suppress(OSError):
        (folder / FAILURES).write_text(json.dumps(list(failures)), encoding="utf-8")


def read_ends(folder: Path) -> list[End]:
    """Every end that was seen, first ones first; what only torchrun found comes last."""
    found: dict[int, End] = {}
    for body in _lines(folder / ENDS):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            at = float(body["at"])
            if math.isfinite(at):
                pid = _number(body["pid"])
                found[pid] = End(pid, _number(body["code"]), at)
    failures: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        failures = json.loads((folder / FAILURES).read_bytes())
    for body in failures if isinstance(failures, list) else []:
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            rank, pid, code = (_number(body[key]) for key in ("rank", "pid", "code"))
            found[pid] = replace(found.get(pid, End(pid, code, math.inf)), rank=rank)
    return sorted(found.values(), key=lambda end: end.at)


def _number(value: Any) -> int:
    if not -MAX_NUMBER <= (number := int(value)) <= MAX_NUMBER:
        raise ValueError(number)
    return number


def _lines(path: Path) -> list[Any]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return found
