"""Tidying a slower tier, after each commit there: what the policy of the run's place lets go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.dumping.old_dumps import old_dumps, remove
from trainckpt.snapshot import catalog, prune
from trainckpt.snapshot.attempts import newest, read_attempts

if TYPE_CHECKING:
    from trainckpt.lifecycle.flushing.flush_work import Work
    from trainckpt.tiers.base import Tier


class Tidy:
    """Of one tier. One thread, of rank 0."""

    def __init__(self, tier: Tier, work: Work) -> None:
        self._tier, self._work = tier, work
        self._dumps_tidied = 0  # the attempt for which that was done

    def prune(self) -> None:
        """By the policy of the run's place; a newer attempt decides by itself."""
        work = self._work

        def is_superseded() -> bool:
            return newest(work.place) > work.attempt

        if is_superseded():
            return
        records = read_attempts(work.place)
        if self._dumps_tidied != work.attempt:  # which leaves none while it runs
            self._dumps_tidied = work.attempt
            for old in old_dumps(self._tier, records, is_copy=True):
                remove(self._tier, old, is_copy=True)
        candidates = catalog.read_catalog(self._tier, work.run, records)
        prune.prune_by_policy(
            self._tier, candidates, keep_last=work.keep_last, attempt=work.attempt,
            unless=is_superseded,
        )  # fmt: skip
