"""Report what the saves and uploads of a live attempt do now, for its heartbeat. Rank 0.

Called on the heartbeat's thread, beside all others: it reads, and waits for nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.format.names import SnapshotName
from trainckpt.format.save_history import NOT_COPIED

if TYPE_CHECKING:
    from trainckpt.attempt.live_status import LiveStatus
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.estimates import Timings
    from trainckpt.save.schedule import SaveSchedule


class LiveReport:
    """Reads the parts of one attempt."""

    def __init__(
        self,
        *,
        saver: SaveCoordinator,
        schedule: SaveSchedule,
        timings: Timings,
        position: ProgressCounter,
    ) -> None:
        self._saver, self._schedule = saver, schedule
        self._timings, self._position = timings, position

    def complete(self, status: LiveStatus) -> LiveStatus:
        """Return the status with what the saves do."""
        saver, now_s = self._saver, time.monotonic()
        history = saver.saves.history()
        replicator = saver.replication.replicator
        replicates = replicator is not None and replicator.plan.num_losses > 0
        replicated = replicator.newest if replicates and replicator is not None else None
        return replace(
            status,
            micro_batch_s=self._timings.micro_batch_s,
            window=self._position.window,
            saving=saver.saving_now(now_s),
            next_saves=self._schedule.next_saves(now_s),
            skipped=history.skipped,
            failed=history.failed,
            not_saved=tuple(each for each in history.not_kept if each.how != NOT_COPIED),
            uploads=tuple(each.upload_now(now_s) for each in saver.uploads.uploaders),
            in_memory=_name_of(saver.arenas.newest),
            replicated=_name_of(replicated),
            replicates=replicates,
        )


def _name_of(folder: str | None) -> str:
    """Return the full name of the snapshot in a folder."""
    name = SnapshotName.parse((folder or "").rpartition("/")[2])
    return "" if name is None else str(name)
