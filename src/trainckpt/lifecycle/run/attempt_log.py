"""The attempt's record, kept up to date by rank 0 alone; other ranks keep it in memory only.

The training thread and the saving thread both write, so every change goes through one lock. A
change that cannot be written is logged: the record informs, it never stops training.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.run.attempt_number import AttemptNumber
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import attempts
from trainckpt.tiers.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Tier


class AttemptLog:
    """Holds and rewrites one attempt's record."""

    def __init__(self, tier: Tier, record: AttemptRecord, *, writes: bool) -> None:
        self._tier = tier
        self._record = record
        self._writes = writes
        self._number = AttemptNumber(record.attempt)
        self._lock = threading.Lock()

    @property
    def record(self) -> AttemptRecord:
        """The record as it is now."""
        return self._record

    def note(self, key: str, name: str, value: Any) -> None:
        """Set one name of a table among the record's facts; as `change`."""
        with self._lock:
            self._renumber()
            facts = self._record.facts
            table = {**facts.get(key, {}), name: value}
            self._write(must=False, facts={**facts, key: table})

    def change_soon(self, **changes: Any) -> None:
        """As `change`, for the training thread: it does not wait for a store."""
        if isinstance(self._tier, ObjectStoreTier) and self._writes:
            call = partial(self.change, **changes)
            threading.Thread(target=call, name="trainckpt-record", daemon=True).start()
        else:
            self.change(**changes)

    def change(self, *, must: bool = False, **changes: Any) -> None:
        """Replace some fields, here and (rank 0) in the run's place.

        Args:
            must: Raise if it cannot be written: a parent that is not recorded would let a later
                attempt take an abandoned branch for its ancestry.
            changes: Fields of `AttemptRecord`.
        """
        with self._lock:
            self._write(must=must, **changes)

    def _renumber(self) -> None:
        """Restored from a dump, the processes are the attempt that the supervisor has claimed."""
        number = self._number.value
        if number == self._record.attempt:
            return
        with contextlib.suppress(TrainckptError):
            claimed = attempts.read_attempts(self._tier).get(number)
            if claimed is not None:
                own = self._record
                facts = {**own.facts, **claimed.facts}
                self._record = claimed.with_(state=own.state, facts=facts)

    def _write(self, *, must: bool, **changes: Any) -> None:
        self._renumber()
        self._record = self._record.with_(**changes)
        if not self._writes:
            return
        try:
            attempts.replace(self._tier, self._record)
        except TrainckptError as error:
            if must:
                raise
            logger.warning("the attempt's record could not be written: %s", error.message)
