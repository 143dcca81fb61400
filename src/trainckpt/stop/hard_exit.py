"""End this process at once, wherever main is, from any thread. The callers, and their reasons:

    NoticeWatcher    the ranks could not agree on a stop
    Deadline         a stop's deadline has passed
    SurvivorSetup    other ranks are gone, and what remained is saved: main would wait for ever

Each calls the one `HardExit` of this process. Notices are received, and ranks watched, before an
attempt can record its end, so until its `Shutdown` is built the process only exits with 71.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.ranks.notice_watcher import end_with_71

if TYPE_CHECKING:
    from collections.abc import Callable


class HardExit:
    """Ends the process when called; never returns."""

    def __init__(self) -> None:
        self._end: Callable[[str], object] = end_with_71

    def __call__(self, why: str) -> None:
        """End the process for this reason."""
        self._end(why)

    def record_first(self, cut_short: Callable[[str], object]) -> None:
        """End the process by this function from now on; it records the end before."""
        self._end = cut_short
