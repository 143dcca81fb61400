"""A supervisor within another one's launch, as of a job script that calls `trainckpt run`.

    <outer supervisor's folder>/nested-<pid>.json    one word, replaced as it goes on

Its ranks tell it alone, so nothing of them is seen from outside. The outer one hands on what it
gets, and waits; how the inner one ended counts: what is between them, such as `make`, may say less.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import rank_status
from trainckpt.attempt.rank_status import (
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
    """Status of an inner supervisor, as it reported it."""

    # pid, namespace: its process, as of `attempt.rank_status.RankStatus`
    pid: Pid
    namespace: str
    folder: str = ""  # where the ranks of its present launch tell it; "": there was none yet
    exit_code: ExitCode | None = None  # what it returns; None while it is at work
    # how, why, on_purpose: as of its last launch's `outcome.Outcome`
    how: str = ""
    why: str = ""
    on_purpose: bool = False
    at: float = 0.0  # when it said that (`time.time`)


class ParentReporter:
    """Reports of this supervisor to an outer one; without an outer one every call does nothing."""

    def __init__(self) -> None:
        parent_folder = launch_folder()
        self._above = (
            parent_folder if parent_folder is not None and rank_status.is_supervised() else None
        )
        self._said = Nested(os.getpid(), namespace_of("self"))
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Say that some fields have changed."""
        self._said = replace(self._said, **changes)
        if self._above is None:
            return
        with contextlib.suppress(OSError):
            write_status(self._above / f"nested-{self._said.pid}.json", self._said)


def read(folder: Path) -> list[Nested]:
    """Those in this launch, whose last word is the oldest first; an unreadable one said nothing."""
    return [
        replace(word, at=written_at)
        for word, written_at in read_statuses(folder, "nested-*.json", Nested)
    ]


def graces_s(words: Sequence[Nested]) -> list[float]:
    """Return the graces reported by the ranks of inner supervisors at work."""
    folders = [Path(word.folder) for word in words if word.folder and word.exit_code is None]
    statuses = [status for folder in folders for status in read_rank_statuses(folder).values()]
    return [status.grace_s for status in statuses if status.grace_s is not None]


def all_stopped(folder: Path) -> bool:
    """Return True if there were inner supervisors and each has ended by a stop."""
    reports = read(folder)
    return bool(reports) and all(report.how == STOPPED and report.on_purpose for report in reports)
