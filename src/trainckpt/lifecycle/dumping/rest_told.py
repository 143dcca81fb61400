"""A dump at a boundary: what a supervisor and the ranks that rest there tell each other.

    <supervisor's folder>/rest.json        {"id", "pid", "refused"}       the supervisor's
    <supervisor's folder>/rest<rank>.json  {"id", "snapshot", "dropped"}  of each rank that rests

The first is written before anybody tells the ranks to stop, so at the stop all of them find it, or
none. It comes back with the dump, so what counts is what `attempt_number` says then.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.run.living import lives

if TYPE_CHECKING:
    from pathlib import Path

ORDER = "rest.json"
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class RestOrder:
    """The ranks are to rest at the stop that comes next, and are dumped there.

    Attributes:
        id: Of this order; each is obeyed once.
        pid: Of the supervisor that gave it.
        refused: Why there is no dump after all, or "".
    """

    id: str
    pid: int
    refused: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether the supervisor that gave it is gone: nobody will dump."""
        return not lives(self.pid)


def give(folder: Path, order: RestOrder) -> None:
    """Write the order. `OSError` where that is not possible."""
    _replace(folder / ORDER, asdict(order))


def refuse(folder: Path, order: RestOrder, why: str) -> None:
    """Let the ranks leave. What cannot be written has no reader either."""
    with contextlib.suppress(OSError):
        give(folder, replace(order, refused=why or "no reason was given"))


def given(folder: Path) -> RestOrder | None:
    """The order as it is now; None: there is none."""
    body = _read(folder / ORDER)
    with contextlib.suppress(TypeError):
        order = RestOrder(**body)
        if type(order.pid) is int and 0 < order.pid < 2**31 and isinstance(order.refused, str):
            return order if isinstance(order.id, str) and order.id else None
    return None


@dataclass(frozen=True)
class Resting:
    """Of one rank: it changes nothing before it is brought back, or may leave.

    Attributes:
        id: Of the order it obeys.
        snapshot: The one that holds what it has dropped from memory, or "".
        dropped: So many bytes.
    """

    id: str
    snapshot: str = ""
    dropped: int = 0


def rests(folder: Path, rank: int, told: Resting) -> None:
    """A rank rests. `OSError` where that cannot be told."""
    _replace(folder / f"rest{rank}.json", asdict(told))


def resting(folder: Path, order: RestOrder) -> list[Resting]:
    """The ranks that rest because of this order."""
    found = []
    for path in folder.glob("rest[0-9]*.json"):
        with contextlib.suppress(TypeError):
            told = Resting(**_read(path))
            if told.id == order.id and type(told.dropped) is int and type(told.snapshot) is str:
                found.append(told)
    return found


def _replace(path: Path, body: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(body), encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            body = json.loads(file.read(MAX_BYTES))
        if isinstance(body, dict):
            return body
    return {}
