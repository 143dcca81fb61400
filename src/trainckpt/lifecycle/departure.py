"""Departure: the three ways an attempt ends, and what it leaves behind.

    stop      all ranks agreed: snapshot, record, barrier, workers killed, `Stopped`
    finish    the script is done: final snapshot, barrier, record
    abandon   an exception: the final count is published, so that others need not wait for this
              rank; record. No barrier, no snapshot: the state may be anything

The record is written after the snapshot is committed and before the process ends, because
launchers swallow exit codes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, SaveFailed, TrainckptError, UnusableSnapshot
from trainckpt.format.attempt import ENDED, FAILED, FINISHED, STOPPED
from trainckpt.lifecycle.fingerprint import EXACT
from trainckpt.lifecycle.log import logger
from trainckpt.lifecycle.stopped import Stopped
from trainckpt.lifecycle.told import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.attempt_log import AttemptLog
    from trainckpt.lifecycle.options import Options
    from trainckpt.lifecycle.pending import PendingSave
    from trainckpt.lifecycle.requests import Requests
    from trainckpt.lifecycle.saver import Saver
    from trainckpt.lifecycle.told import Teller
    from trainckpt.lifecycle.watch import Watch
    from trainckpt.ranks.channel import Channel

    Take = Callable[[Cursor, str], PendingSave]

BARRIER_TIMEOUT_S = 60.0
EXIT_AFTER_S = 5.0
SAVE_IN_FLIGHT_S = 5.0  # an exception waits so long for a save that is nearly there


class Departure:
    """Ends one attempt, once.

    Attributes:
        left: True once the attempt has ended, in whatever way.
        stopped: True if it ended by an agreed stop.
        exactness: Of the resume this attempt began with, for the record.
        log: The attempt's record.
    """

    def __init__(
        self,
        options: Options,
        channel: Channel,
        saver: Saver,
        watch: Watch,
        log: AttemptLog,
        teller: Teller,
        requests: Requests,
        loaders: Sequence[tuple[object, TrackedLoader]],
    ) -> None:
        self.left = self.stopped = False
        self.exactness = EXACT
        self.log = log
        self._options = options
        self._channel = channel
        self._saver = saver
        self._watch = watch
        self._teller = teller
        self._requests = requests
        self._loaders = loaders  # the owner's own list: a loader may be registered later
        self._parent: tuple[str, Cursor] | None = None
        self._begun_s = time.monotonic()
        self._code = options.exit_code

    def began_from(self, snapshot: str | None, cursor: Cursor) -> None:
        """The snapshot this attempt began from; it stands until a newer one is committed."""
        self._parent = (snapshot, cursor) if snapshot else None

    def stop(self, cursor: Cursor, reason: str, take: Take) -> None:
        """All ranks stop here. Raises `Stopped`, or returns with `on_stop="return"`."""
        self._save_unless_standing(cursor, reason, take)
        snapshot, lost = self._standing(cursor)
        self._code = self._options.exit_code if snapshot else UnusableSnapshot.exit_code
        if self._channel.world.rank == 0:
            where = f"saved {snapshot}" if not lost else f"{snapshot} stands, {lost} are lost"
            logger.info("stopped by %s at %s: %s", reason, cursor, where)
        self.stopped = True
        self._end(STOPPED, cursor, self._code, reason)
        self._barrier("stopped")
        for _, loader in self._loaders:
            loader.shutdown()
        self._stop_watching()
        if self._options.on_stop == "return":
            return
        self._exit_soon()
        raise Stopped(self._code, snapshot, reason)

    def finish(self, cursor: Cursor, take: Take) -> None:
        """The script is done.

        Raises:
            SaveFailed: the final snapshot did not commit; said after all ranks have left in order.
        """
        failure = self._save_unless_standing(cursor, "final", take)
        self._watch.watcher.publish_final()  # committed: whatever is decided from now on is ignored
        self._barrier("finished")
        code = failure.exit_code if failure else 0
        self._end(FAILED if failure else FINISHED, cursor, code, "final")
        self._stop_watching()
        if failure:
            raise failure

    def abandon(self, error: BaseException | None, cursor: Cursor) -> None:
        """An exception leaves the script."""
        if self.left:
            return
        with contextlib.suppress(NoAgreement):
            self._watch.watcher.publish_final()
        code = error.code if isinstance(error, SystemExit) else 1
        code = error.exit_code if isinstance(error, TrainckptError) else code
        self._saver.wait(SAVE_IN_FLIGHT_S)
        self._end(FAILED, cursor, code if isinstance(code, int) else 1, repr(error)[:500])
        self._watch.end()

    def exit_now(self) -> None:
        """A boundary was reached after `Stopped`: somebody caught it. Leave the process."""
        logger.warning("the script went on after it was stopped; leaving now")
        os._exit(self._code)

    def _save_unless_standing(self, cursor: Cursor, reason: str, take: Take) -> SaveFailed | None:
        """Take a snapshot, unless one of this very cursor stands; returns why it failed."""
        self._saver.wait()
        snapshot, lost = self._standing(cursor)
        if snapshot and not lost:
            return None
        pending = take(cursor, reason)
        self._saver.wait()
        return pending.error

    def _standing(self, cursor: Cursor) -> tuple[str | None, int]:
        """Newest snapshot to go on from, and how many micro-batches it lies back."""
        newest = self._saver.committed or self._parent
        if newest is None:
            return None, cursor.micro_batches
        name, at = newest
        return name, 0 if at.place() == cursor.place() else max(
            1, cursor.micro_batches - at.micro_batches
        )

    def _end(self, how: str, cursor: Cursor, code: int, reason: str) -> None:
        self.left = True
        self._requests.fail_waiting(how)
        snapshot, lost = self._standing(cursor)
        outcome: dict[str, Any] = {
            "outcome": how,
            "snapshot": snapshot,
            "kind": "snapshot",
            "exactness": self.exactness,
            "lost_micro_batches": lost,
            "tiers": ["local"] if snapshot else [],
            "seconds": round(time.monotonic() - self._begun_s, 3),
            "exit_code": code,
            "reason": reason,
        }
        self.log.change(state=ENDED if how != FAILED else self.log.record.state, outcome=outcome)
        self._teller.tell(state=LEFT, how=how, exit_code=code)

    def _barrier(self, name: str) -> None:
        try:
            self._channel.barrier(name, BARRIER_TIMEOUT_S)
        except NoAgreement as error:
            logger.warning("leaving without the others: %s", error.message)

    def _stop_watching(self) -> None:
        self._watch.end()
        for problem in self._watch.watcher.problems:
            logger.warning("while watching: %s", problem)
        self._barrier("gone")  # the process that holds the store leaves last

    def _exit_soon(self) -> None:
        timer = threading.Timer(EXIT_AFTER_S, os._exit, [self._code])
        timer.daemon = True
        timer.start()
