"""Retention in a slower tier, after each commit there, by the policy of the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.snapshot import catalog, prune
from trainckpt.snapshot.attempt_history import newest, read_attempts

if TYPE_CHECKING:
    from trainckpt.replicate.uploads import UploadContext
    from trainckpt.storage.base import Tier


class RetentionTask:
    """Retention of one tier. One thread, on rank 0."""

    def __init__(self, tier: Tier, work: UploadContext) -> None:
        self._tier, self._work = tier, work

    def prune(self) -> None:
        """Prune by the policy of the run directory; a newer attempt decides by itself."""
        work = self._work

        def is_superseded() -> bool:
            return newest(work.run_tier) > work.attempt

        if is_superseded():
            return
        records = read_attempts(work.run_tier)
        candidates = catalog.read_catalog(self._tier, work.run, records)
        prune.prune_by_policy(
            self._tier,
            candidates,
            keep_last=work.keep_last,
            attempt=work.attempt,
            unless=is_superseded,
        )
