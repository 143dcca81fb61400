"""Report this rank's progress to its supervisor about once a second.

    <supervisor's folder>/pace<rank>.json    {"since_s", "micro_batch_s", "save_s"}

From it the supervisor judges whether a boundary can be reached before a deadline, also while the
training thread holds up everything else. A source of notices by its form alone: it never has one.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.attempt.rank_status import launch_folder, read_statuses, write_status

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.notice import Notice
    from trainckpt.save.estimates import Timings

FIRST_SAVE_S = 1.0  # estimate for a run without a save yet


@dataclass(frozen=True)
class RankProgress:
    """One rank's reported progress.

    Attributes:
        since_s: Seconds since its last boundary, at the time of reading.
        micro_batch_s: Duration of a recent micro-batch; None: not known yet.
        save_s: Duration of the last save; None: no save yet.
    """

    since_s: float
    micro_batch_s: float | None
    save_s: float | None

    def boundary_s(self) -> float | None:
        """Return the estimated seconds until the rank has reached a boundary and saved there.

        A micro-batch already slower than usual is assumed to take as long again. None before the
        first boundary.
        """
        if self.micro_batch_s is None:
            return None
        left_s = self.micro_batch_s - self.since_s
        left_s = left_s if left_s >= 0 else self.since_s
        return left_s + (FIRST_SAVE_S if self.save_s is None else self.save_s)


class ProgressReporter:
    """Write the report file at each poll by the watcher."""

    def __init__(self, timings: Timings, rank: int) -> None:
        folder = launch_folder()
        self._path = folder / f"pace{rank}.json" if folder else None
        self._timings = timings

    def start(self) -> None:
        """Nothing to set up."""

    def fileno(self) -> int | None:
        """None: it is polled once a second."""
        return None

    def poll(self) -> list[Notice]:
        """Report the progress; return no notices."""
        since_s = self._timings.since_s(time.monotonic())
        if self._path is not None and since_s is not None:
            told = RankProgress(since_s, self._timings.micro_batch_s, self._timings.save_s)
            with contextlib.suppress(OSError):
                write_status(self._path, told)
        return []

    def stop(self) -> None:
        """Nothing to put back."""


def read_paces(folder: Path) -> list[RankProgress]:
    """Return the progress reports of this host's ranks, as of now."""
    now = time.time()
    return [
        replace(progress, since_s=progress.since_s + max(0.0, now - written_at))
        for progress, written_at in read_statuses(folder, "pace*.json", RankProgress)
    ]
