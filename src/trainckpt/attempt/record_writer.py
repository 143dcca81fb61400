"""Write the record of this process's attempt, and follow its number.

`RecordWriter`: rank 0 alone writes the record; other ranks hold it in memory. The training thread
and the saving thread both write, so every change goes through one lock. A change that cannot be
written is logged: the record informs, it never stops training.

`AttemptId`: the number as claimed, until the processes are restored from a dump as another attempt
(`status_files.RestoreAnnouncement`).
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.save_recorder import SaveRecorder
from trainckpt.attempt.status_files import (
    RESTORED_FILE,
    RestoreAnnouncement,
    launch_folder,
    read_restore_announcement,
    read_status,
)
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_times import TIMES
from trainckpt.format.save_history import SAVES
from trainckpt.snapshot import attempt_history
from trainckpt.storage.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from trainckpt.attempt.time_keeper import TimeKeeper
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Tier


class AttemptId:
    """Current number, read anew each time; without a supervisor the claimed one. Any thread."""

    def __init__(self, claimed: int) -> None:
        self._claimed = claimed
        folder = launch_folder()
        self._file = folder / RESTORED_FILE if folder else None

    @property
    def value(self) -> int:
        """The number now."""
        if self._file is None:
            return self._claimed
        restored = read_status(self._file, RestoreAnnouncement)
        return self._claimed if restored is None else max(restored.attempt, self._claimed)


class RecordWriter:
    """Holds and rewrites one attempt's record.

    Attributes:
        saves: What became of the attempt's saves, written with each change.
    """

    def __init__(
        self,
        tier: Tier,
        record: AttemptRecord,
        *,
        writes: bool,
        times: TimeKeeper | None = None,
    ) -> None:
        """`times`: of the attempt, written with each change."""
        self._tier, self._times = tier, times
        self.saves = SaveRecorder()
        self._record = record
        self._writes = writes
        self._number = AttemptId(record.attempt)
        self._kept: dict[str, dict[str, Any]] = {}  # facts still to be written
        self._lock = threading.Lock()

    @property
    def record(self) -> AttemptRecord:
        """The record as it is now."""
        return self._record

    @property
    def is_remote(self) -> bool:
        """True if each write is a request to an object store."""
        return isinstance(self._tier, ObjectStoreTier)

    def set_fact(self, key: str, name: str, value: Any) -> None:
        """Set one name of a table among the record's facts; as `change`."""
        with self._lock:
            self._renumber()
            facts = self._record.facts
            table = {**facts.get(key, {}), name: value}
            self._write(must=False, facts={**facts, key: table})

    def keep_fact(self, key: str, name: str, value: Any) -> None:
        """Set one name of a table among the facts; written with the next change. Training thread.

        No lock: a change that waits for a store holds it for minutes.
        """
        self._kept = {**self._kept, key: {**self._kept.get(key, {}), name: value}}

    def set_facts(self, facts: dict[str, Any]) -> None:
        """Set some of the record's facts, and keep the others; as `change`.

        In a directory that vanished nothing is written: that would make the directory anew.
        """
        with self._lock, contextlib.suppress(TrainckptError):  # of `size`
            self._renumber()
            key = attempt_history.record_key(self._record.attempt)
            if self.is_remote or self._tier.size(key) is not None:
                self._write(must=False, facts={**self._record.facts, **facts})

    def change_soon(self, **changes: Any) -> None:
        """Change as `change`, without a wait for a store. Training thread."""
        if self.is_remote and self._writes:
            call = partial(self.change, **changes)
            threading.Thread(target=call, name="trainckpt-record", daemon=True).start()
        else:
            self.change(**changes)

    def change(self, *, must: bool = False, **changes: Any) -> None:
        """Replace some fields, here and (rank 0) in the run directory.

        Args:
            must: Raise if the record cannot be written: without a recorded parent a later attempt
                would take an abandoned branch for its ancestry.
            changes: Fields of `AttemptRecord`.
        """
        with self._lock:
            self._write(must=must, **changes)

    def _renumber(self) -> None:
        """Adopt the attempt that the supervisor has claimed for processes restored from a dump."""
        number = self._number.value
        if number == self._record.attempt:
            return
        with contextlib.suppress(TrainckptError):
            claimed = attempt_history.read_attempt(self._tier, number)
            if claimed is not None:
                own = self._record
                facts = {**own.facts, **claimed.facts}
                facts.pop(SAVES, None)
                self.saves.begin_anew()
                restored = read_restore_announcement()
                if self._times is not None and restored is not None:
                    self._times.begin_anew(restored.started)
                self._record = claimed.with_(state=own.state, facts=facts)

    def _write(self, *, must: bool, **changes: Any) -> None:
        self._renumber()
        facts = changes.get("facts", self._record.facts)
        for key, table in self._kept.items():
            facts = {**facts, key: {**facts.get(key, {}), **table}}
        if self._times is not None:
            facts = {**facts, TIMES: self._times.to_json()}
        if self._writes and (saves := self.saves.to_json()):
            facts = {**facts, SAVES: saves}
        self._record = self._record.with_(**{**changes, "facts": facts})
        if not self._writes:
            return
        try:
            attempt_history.replace(self._tier, self._record)
        except TrainckptError as error:
            if must:
                raise
            logger.warning("the attempt's record could not be written: %s", error.message)
