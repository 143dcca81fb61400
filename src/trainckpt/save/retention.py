"""Retention: prune old snapshots, dumps and survivors' files after a commit.

On rank 0, by a thread that ends when nothing is left to do. The next save begins meanwhile: storage
that commits and then hangs, or deletes slowly, delays neither training nor a save. A snapshot that
may be deleted stays so, however many saves are committed before it is (`snapshot.prune`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.dumping.old_dumps import old_dumps, remove
from trainckpt.errors import TierUnavailable, TrainckptError
from trainckpt.format import names
from trainckpt.snapshot import prune
from trainckpt.snapshot.attempt_history import newest
from trainckpt.snapshot.followed_run import FollowedRun
from trainckpt.storage.denied_access import is_denied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.format.dump import DumpName
    from trainckpt.format.manifest import Manifest
    from trainckpt.save.committer import ManifestDefaults
    from trainckpt.storage.base import Tier


PRUNE_WITHIN_S = 5.0  # a stop waits so long for old snapshots to be pruned


class RetentionWorker:
    """Prune after commits of one attempt: after the newest one; earlier ones need no more."""

    def __init__(
        self,
        tier: Tier,
        defaults: ManifestDefaults,
        record_writer: RecordWriter,
        being_read: Callable[[], Collection[str]],
    ) -> None:
        """`being_read`: full names of snapshots that must not be pruned now."""
        self._tier, self._defaults, self._record_writer, self._being_read = (
            tier,
            defaults,
            record_writer,
            being_read,
        )
        self._lock = threading.Lock()
        self._is_due = False
        self._newest_commit: Manifest | None = None
        self._thread: threading.Thread | None = None
        self._superseded = False
        self._warned_of: set[str] = set()
        self._followed = FollowedRun(tier, tier, defaults.run)
        # One manifest of this attempt is parsed: unreadable ones delete nothing.
        self._is_readable = False
        self._empty_dumps: set[DumpName] = set()
        self._may_have_survivor_files = True  # older attempts may have left survivors' files

    def schedule(self, manifest: Manifest | None) -> None:
        """Schedule the work after the commit of this manifest. Returns at once.

        None: this attempt ends without a commit; earlier ones may have left something to prune.
        """
        if self._is_readable and manifest is not None:
            self._followed.add(manifest)
        with self._lock:
            self._newest_commit, self._is_due = manifest, True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="trainckpt-tidy", daemon=True
                )
                self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Return when nothing is left to do, or after `limit_s` seconds."""
        with self._lock:  # else it may not have been started yet
            thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def _work(self) -> None:
        # background thread: no collectives here
        while self._is_next():
            if (manifest := self._newest_commit) is not None:
                self._record_writer.change(newest_commit=str(manifest.name))
            try:
                self._prune()
                self._is_readable = manifest is not None and self._followed.knows(manifest.name)
            except TrainckptError as error:
                self._warn(_with_hint(error))
            except Exception as error:  # noqa: BLE001 - what is left goes the next time
                self._warn(repr(error))

    def _warn(self, why: str) -> None:
        if why not in self._warned_of:  # else each save would say it again
            self._warned_of.add(why)
            logger.warning("could not prune old snapshots: %s", why)

    def _is_next(self) -> bool:
        with self._lock:
            is_due, self._is_due = self._is_due, False
            if not is_due:
                self._thread = None
            return is_due

    def _prune(self) -> None:
        if self._is_superseded():
            return  # a newer attempt decides what is kept
        attempts = self._followed.attempts(self._defaults.attempt)
        try:
            for old in old_dumps(self._tier, attempts, self._empty_dumps):
                remove(self._tier, old)
        except TierUnavailable as error:
            if not is_denied(error):
                raise
            self._warn(_with_hint(error))  # another user's dumps keep no snapshot
        prune.prune_by_policy(
            self._followed,
            attempts,
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


def _with_hint(error: TrainckptError) -> str:
    return f"{error.message}; next: {error.hint}" if error.hint else error.message
