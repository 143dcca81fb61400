"""Nested supervisors: a job script under `trainckpt run` that calls `trainckpt run`.

    <outer supervisor's folder>/nested-<pid>.json    the inner one's status, replaced as it goes on

Ranks report to the inner supervisor alone. The outer one forwards signals to it, and waits; the
inner one's outcome counts: programs between them, such as `make`, may report less.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import status_files
from trainckpt.attempt.status_files import (
    ExitCode,
    Pid,
    launch_folder,
    namespace_of,
    read_rank_statuses,
    read_statuses,
    write_status,
)
from trainckpt.format.attempt_record import STOPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_WHY = 500


@dataclass(frozen=True)
class Nested:
    """Status of an inner supervisor."""

    pid: Pid
    namespace: str
    folder: str = ""  # its own folder of status files; "" before its first launch
    exit_code: ExitCode | None = None  # None while it is at work
    how: str = ""  # this and the next two: of its last launch's `outcome.Outcome`
    why: str = ""
    on_purpose: bool = False
    at: float = 0.0  # time of the status (`time.time`)


class ParentReporter:
    """Reports of this supervisor to an outer one; without an outer one every call does nothing."""

    def __init__(self) -> None:
        parent_folder = launch_folder()
        self._above = (
            parent_folder if parent_folder is not None and status_files.is_supervised() else None
        )
        self._said = Nested(os.getpid(), namespace_of("self"))
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Report changed fields."""
        self._said = replace(self._said, **changes)
        if self._above is None:
            return
        with contextlib.suppress(OSError):
            write_status(self._above / f"nested-{self._said.pid}.json", self._said)


def read(folder: Path) -> list[Nested]:
    """Return the readable statuses in this launch, the oldest first."""
    found = read_statuses(folder, "nested-*.json", Nested)
    return [replace(status, at=written_at) for status, written_at in found]


def graces_s(nested: Sequence[Nested]) -> list[float]:
    """Return the graces reported by the ranks of inner supervisors at work."""
    folders = [Path(each.folder) for each in nested if each.folder and each.exit_code is None]
    statuses = [status for folder in folders for status in read_rank_statuses(folder).values()]
    return [status.grace_s for status in statuses if status.grace_s is not None]


def all_stopped(folder: Path) -> bool:
    """Return True if there were inner supervisors and each has ended by a stop."""
    reports = read(folder)
    return bool(reports) and all(report.how == STOPPED and report.on_purpose for report in reports)
