"""The pace of this rank, told to its supervisor about once a second.

    <supervisor's folder>/pace<rank>.json    {"since_s", "micro_batch_s", "save_s"}

From it the supervisor judges whether a boundary can be reached before a deadline, also while the
training thread holds up everything else. A source of notices by its form alone: it never has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.told import folder_of_launch

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.lifecycle.deciding.pace import Pace
    from trainckpt.preemption.notice import Notice

MAX_BYTES = 4096
FIRST_SAVE_S = 1.0  # of a run that has saved nothing yet


@dataclass(frozen=True)
class ToldPace:
    """What one rank has told.

    Attributes:
        since_s: How long ago it passed its last boundary, when it is read.
        micro_batch_s: How long one takes, by the last ones; None: not known yet.
        save_s: How long the last save took; None: there was none.
    """

    since_s: float
    micro_batch_s: float | None
    save_s: float | None

    def boundary_s(self) -> float | None:
        """Until it reaches a boundary and has saved there, as far as can be foreseen.

        A micro-batch that takes longer than the others will, for all that is known, take as long
        again. Before the first boundary nothing is known.
        """
        if self.micro_batch_s is None:
            return None
        left_s = self.micro_batch_s - self.since_s
        left_s = left_s if left_s >= 0 else self.since_s
        return left_s + (FIRST_SAVE_S if self.save_s is None else self.save_s)


class PaceTeller:
    """Writes the file when it is polled, by the watcher."""

    def __init__(self, pace: Pace, rank: int) -> None:
        folder = folder_of_launch()
        self._path = folder / f"pace{rank}.json" if folder else None
        self._pace = pace

    def start(self) -> None:
        """Nothing to set up."""

    def fileno(self) -> int | None:
        """None: it is polled once a second."""
        return None

    def poll(self) -> list[Notice]:
        """Tell; there never is a notice."""
        since_s = self._pace.since_s(time.monotonic())
        if self._path is not None and since_s is not None:
            told = ToldPace(since_s, self._pace.micro_batch_s, self._pace.save_s)
            temporary = self._path.with_name(self._path.name + ".tmp")
            with contextlib.suppress(OSError):
                temporary.write_text(json.dumps(asdict(told)), encoding="utf-8")
                temporary.replace(self._path)
        return []

    def stop(self) -> None:
        """Nothing to put back."""


def read_paces(folder: Path) -> list[ToldPace]:
    """What the ranks of this host have told, as of now."""
    found = []
    for path in sorted(folder.glob("pace*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            with path.open("rb") as file:
                told = ToldPace(**json.loads(file.read(MAX_BYTES)))
                age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
            numbers = [told.since_s, told.micro_batch_s or 0.0, told.save_s or 0.0]
            if all(type(n) in (int, float) and n >= 0 for n in numbers):
                found.append(replace(told, since_s=told.since_s + age_s))
    return found
