"""The supervisor was killed (SIGKILL, or the kernel short of memory), and the ranks train on.

Nobody passes them a scheduler's signal any more, nobody starts them again, and whoever repeats the
command trains beside them. So they stop as at any notice: nothing is lost, and the place is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.supervisor_told import is_gone
from trainckpt.preemption.notice import Notice

if TYPE_CHECKING:
    from pathlib import Path

REASON = "`trainckpt run`, which started this, is gone"


class SupervisorGone:
    """Looks once a second; a `NoticeSource` without descriptor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """Nothing to set up."""

    def fileno(self) -> int | None:
        """None: it is looked for about once a second."""
        return None

    def poll(self) -> list[Notice]:
        """A stop, from when it is gone."""
        return [Notice(REASON)] if is_gone(self._folder) else []

    def stop(self) -> None:
        """Nothing to put back."""
