"""Retention after a commit: record the commit, prune old snapshots, delete survivors' messages.

On rank 0, by a thread that ends when nothing is left to do. The next save begins meanwhile: storage
that commits and then hangs, or deletes slowly, delays neither training nor a save. A snapshot that
may be deleted stays so, however many saves are committed before it is (`snapshot.prune`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.dumping.old_dumps import old_dumps, remove
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.snapshot import catalog, prune
from trainckpt.snapshot.attempt_history import newest, read_attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainckpt.attempt.record_log import AttemptLog
    from trainckpt.format.names import SnapshotName
    from trainckpt.save.writer import ManifestDefaults
    from trainckpt.storage.base import Tier


class RetentionWorker:
    """Retention worker of one attempt: it handles the newest commit; earlier ones need no more."""

    def __init__(
        self,
        tier: Tier,
        defaults: ManifestDefaults,
        log: AttemptLog,
        being_read: Callable[[], Collection[str]],
    ) -> None:
        """`being_read`: full names of snapshots that must not be pruned now."""
        self._tier, self._defaults, self._log, self._being_read = tier, defaults, log, being_read
        self._lock = threading.Lock()
        self._newest_commit: SnapshotName | None = None
        self._thread: threading.Thread | None = None
        self._superseded = False
        self._parse = catalog.cached_parse()
        self._may_have_survivor_files = True  # older attempts may have left survivors' files

    def schedule(self, name: SnapshotName) -> None:
        """Schedule the work after this commit. Returns at once."""
        with self._lock:
            self._newest_commit = name
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="trainckpt-tidy", daemon=True
                )
                self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Return when nothing is left to do, or after `limit_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def _work(self) -> None:
        # background thread: no collectives here
        while (name := self._next()) is not None:
            self._log.change(newest_commit=str(name))
            try:
                self._prune()
            except TrainckptError as error:
                logger.warning("could not prune old snapshots: %s", error.message)
            except Exception as error:  # noqa: BLE001 - what is left goes the next time
                logger.warning("could not prune old snapshots: %r", error)

    def _next(self) -> SnapshotName | None:
        with self._lock:
            name, self._newest_commit = self._newest_commit, None
            if name is None:
                self._thread = None
            return name

    def _prune(self) -> None:
        if self._is_superseded():
            return  # a newer attempt decides what is kept
        attempts = read_attempts(self._tier)
        for old in old_dumps(self._tier, attempts):
            remove(self._tier, old)
        candidates = catalog.read_catalog(self._tier, self._defaults.run, attempts, self._parse)
        prune.prune_by_policy(
            self._tier,
            candidates,
            keep_last=self._defaults.keep_last,
            attempt=self._defaults.attempt,
            keep=self._being_read(),
            unless=self._is_superseded,
        )
        if self._may_have_survivor_files:
            self._may_have_survivor_files = False
            for folder in self._tier.list(names.SURVIVORS):
                if folder.isdecimal() and int(folder) < self._defaults.attempt:
                    self._tier.remove_folder(f"{names.SURVIVORS}/{folder}")

    def _is_superseded(self) -> bool:
        """Return True if a newer attempt of the run has begun; log it once."""
        newer = newest(self._tier)
        if newer <= self._defaults.attempt:
            return False
        if not self._superseded:
            self._superseded = True
            logger.warning(
                "attempt %d of this run has begun: the next saves of this attempt, %d, become an "
                "abandoned branch, used only by name",
                newer,
                self._defaults.attempt,
            )
        return True
