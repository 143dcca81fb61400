"""Departure: the ways an attempt ends, and what it leaves behind.

    stop      all ranks agreed: snapshot; the processes may be dumped here, and go on later
              (`rest`); else record, barrier, workers killed, `Stopped`
    finish    the script is done: final snapshot, barrier, record; then copies to slower tiers, as
              long as nobody asks it to leave
    abandon   an exception: the final count is published, so that others need not wait for this
              rank; record. No barrier, no snapshot: the state may be anything
    cut short the ranks could not agree, or a deadline has come: record, and out, from any thread

The record is written after the snapshot is committed and before the process ends, because
launchers swallow exit codes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.data.untracked import hear_of_births
from trainckpt.errors import NoAgreement, TrainckptError, UnusableSnapshot
from trainckpt.format.attempt import ENDED, FAILED, FINISHED, KILLED, STOPPED
from trainckpt.format.exactness import Exactness, How, Restored, decide
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.told import LEFT, RETURNED
from trainckpt.lifecycle.run.uncaught import code_of
from trainckpt.lifecycle.stopping.requeue import LINGER_S, Requeue
from trainckpt.lifecycle.stopping.stopped import Stopped
from trainckpt.preemption import kubernetes
from trainckpt.preemption.slurm import COMMAND_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.run.attempt_log import AttemptLog
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.lifecycle.run.told import Teller
    from trainckpt.lifecycle.saving.requests import Requests
    from trainckpt.lifecycle.stopping.last_save import LastSave
    from trainckpt.lifecycle.stopping.rest import Rest
    from trainckpt.lifecycle.stopping.survival import Survival
    from trainckpt.lifecycle.stopping.watch import Watch
    from trainckpt.ranks.agreement import Due
    from trainckpt.ranks.channel import Channel


BARRIER_TIMEOUT_S = 60.0
ASKED_WITHIN_S = LINGER_S + 2 * COMMAND_S + 30.0
EXIT_AFTER_S = 5.0
RECORD_WITHIN_S = 2.0
KEPT_WORKERS = (
    "a DataLoader with persistent_workers=True that is not tracked has begun its workers: a resume "
    "begins them anew, with other randomness, and draws once more from the main one. Track it too, "
    "loader=[train, validation], and loop over ckpt.loader(validation); or leave "
    "persistent_workers=False"
)
RECORDED = 20  # parts that a record names, the weakest first
SAVE_IN_FLIGHT_S = 5.0  # an exception waits so long for a save that is nearly there


class Departure:
    """Ends one attempt, once.

    Attributes:
        stopped: True if it ended by an agreed stop.
        restored: How the parts of the state were restored that this attempt began with.
        survival: Told that the attempt ends: whoever leaves in order is not lost.
        rest: Who lets the processes be dumped at a stop; None: nobody.
        log: The attempt's record.
    """

    def __init__(
        self,
        options: Options,
        channel: Channel,
        last_save: LastSave,
        watch: Watch,
        log: AttemptLog,
        teller: Teller,
        requests: Requests,
        loaders: Sequence[tuple[object, TrackedLoader]],
        where: Callable[[], Cursor],
    ) -> None:
        self._left = self.stopped = False
        self._pid = os.getpid()
        self.restored: tuple[Restored, ...] = ()
        self.survival: Survival | None = None
        self.rest: Rest | None = None
        self.log = log
        self._options = options
        self._channel = channel
        self._last_save = last_save
        self._watch = watch
        self._teller = teller
        self._requests = requests
        self._loaders = loaders  # the owner's own list: a loader may be registered later
        self._where = where
        self._ending = threading.Lock()
        self._recorded = threading.Event()
        self._begun_s = time.monotonic()
        self._is_resumed = self._keeps_workers = False
        hear_of_births(self._born_untracked)
        self._code = options.exit_code

    @property
    def left(self) -> bool:
        """Whether the attempt has ended, in whatever way; for a process that the script has forked,
        which is no part of it, it always has."""
        return self._left or os.getpid() != self._pid

    @property
    def exactness(self) -> Exactness:
        """Return what this attempt's resume is called, as far as it is known."""
        return decide(self.restored)

    def note(self, parts: Sequence[Restored]) -> None:
        """Say and record what was seen only when training had gone on. Training thread."""
        for part in parts:
            self.restored += (part,)
            if part.how is How.REPLAYED:
                logger.info("%s", part.reason)
            else:
                logger.warning("not exact: %s", part.reason)

    def _born_untracked(self, loader: Any) -> None:
        """The workers of a loader that nobody tracks."""
        if self.left or self._keeps_workers or not loader.persistent_workers:
            return
        self._keeps_workers = True
        if self._is_resumed:
            self.restored += (Restored("untracked loader", How.NOT_KEPT, KEPT_WORKERS),)
        logger.warning("not exact: %s", KEPT_WORKERS)

    def began_from(self, snapshot: str | None, cursor: Cursor) -> None:
        """The snapshot this attempt began from; it stands until a newer one is committed."""
        self._is_resumed = snapshot is not None
        self._last_save.parent = (snapshot, cursor) if snapshot else None

    def stop(self, cursor: Cursor, due: Due) -> bool:
        """All ranks stop here. Raises `Stopped`, or returns False with `on_stop="return"`.

        Returns True where the processes were dumped here, and have come back: training goes on.
        """
        self._watch.reached()
        reason, may_rest = due.reason, self.rest is not None and self.rest.is_asked
        if not may_rest:
            self._survived()
        self._last_save.take(cursor, reason, self._watch.deadline, stops=True)
        snapshot, lost = self._last_save.standing(cursor)
        if self.rest is not None and self.rest.here(due.round, None if lost else snapshot):
            self._channel = self._last_save.go_on(self._channel)
            return True
        if may_rest:
            self._survived()
        self._code = self._options.exit_code if snapshot else UnusableSnapshot.exit_code
        if self._channel.world.rank == 0:
            where = f"saved {snapshot}" if not lost else f"{snapshot} stands, {lost} are lost"
            logger.info("stopped by %s at %s: %s", reason, cursor, where)
        self.stopped = True
        self._end(STOPPED, cursor, self._code, reason)
        self._barrier("stopped")
        for _, loader in self._loaders:
            loader.shutdown()
        self._last_save.flush(reason, self._watch.deadline)
        self._note_tiers(cursor)
        self._last_save.release_memory(keep=True)
        self._ask_to_be_queued_again(reason)
        leaves = self._options.on_stop == "exit"
        self._stop_watching(leaves=leaves)
        if not leaves:
            self._teller.tell(state=RETURNED)
            return False
        exit_soon(self._code, EXIT_AFTER_S)
        raise Stopped(self._code, snapshot, reason)

    def finish(self, cursor: Cursor) -> None:
        """The script is done.

        Raises:
            SaveFailed: the final snapshot did not commit; said after all ranks have left in order.
        """
        self._survived()
        failure = self._last_save.take(cursor, "final", self._watch.deadline)
        self._watch.finishes()  # committed: whatever is decided from now on is ignored
        self._barrier("finished")
        code = failure.exit_code if failure else 0
        self._end(FAILED if failure else FINISHED, cursor, code, "final")
        self._last_save.flush_all(self._watch.asked_to_leave)
        self._note_tiers(cursor)
        self._last_save.release_memory(keep=failure is not None)
        self._stop_watching()
        if failure:
            raise failure

    def abandon(self, error: BaseException | None, cursor: Cursor) -> None:
        """An exception leaves the script."""
        if self.left:
            return
        if self.survival is not None:
            self.survival.after(error)
            self.survival.close(left=False)
        with contextlib.suppress(NoAgreement):
            self._watch.watcher.publish_final()
        code = code_of(error) if isinstance(error, SystemExit) else 1
        code = error.exit_code if isinstance(error, TrainckptError) else code
        self._last_save.wait(SAVE_IN_FLIGHT_S)
        self._last_save.give_up_flushing()
        self._last_save.release_memory(keep=True)
        self._end(FAILED, cursor, code, repr(error)[:500])
        if code == 0 and self._channel.world.rank == 0:
            self._say_what_is_lost(cursor)
        self._watch.end()

    def _say_what_is_lost(self, cursor: Cursor) -> None:
        """By `sys.exit()`, of which whoever wrote it may think that it ends a run well."""
        snapshot, lost = self._last_save.standing(cursor)
        if lost:
            logger.warning(
                "the script left by sys.exit() at %s, with %s: a resume goes on from %s. To save "
                "there, let the loop end (`break`), or call ckpt.close() before",
                cursor, f"{lost} micro-batches that are not saved", snapshot or "step 0",
            )  # fmt: skip

    def cut_short(self, why: str) -> None:
        """End this process now, wherever main is. Any thread."""
        code = self._code if self.left else NoAgreement.exit_code
        exit_soon(code, RECORD_WITHIN_S)  # whatever hangs from here on
        logger.error("%s: leaving at once; what is committed stands", why)
        with contextlib.suppress(Exception):
            self._end(KILLED, self._where(), NoAgreement.exit_code, why)
        self._recorded.wait(RECORD_WITHIN_S)  # main may have begun to record another end
        os._exit(self._code)

    def exit_now(self) -> None:
        """A boundary was reached after `Stopped`: somebody caught it. Leave the process."""
        logger.warning("the script went on after it was stopped; leaving now")
        os._exit(self._code)

    def _end(self, how: str, cursor: Cursor, code: int, reason: str) -> None:
        """Record how the attempt ended; the first word stands."""
        with self._ending:
            if self.left:
                return
            self._left, self._code = True, code
        self._requests.fail_waiting(how)
        snapshot, lost = self._last_save.standing(cursor)
        exactness = self.exactness
        outcome: dict[str, Any] = {
            "outcome": how,
            "snapshot": snapshot,
            "kind": "snapshot",
            "exactness": exactness.word,
            "lost_micro_batches": lost,
            "tiers": self._last_save.holding(snapshot),
            "seconds": round(time.monotonic() - self._begun_s, 3),
            "exit_code": code,
            "reason": reason,
        }
        if exactness.weaker:
            outcome["restored"] = [part.to_json() for part in exactness.weaker[:RECORDED]]
        if self._last_save.skipped:
            outcome["skipped"] = self._last_save.skipped
        if self._last_save.chosen:
            outcome["chosen"] = self._last_save.chosen
        if self.rest is not None and self.rest.why_not:
            outcome["no_dump"] = self.rest.why_not
        self.log.change(state=ENDED if how != FAILED else self.log.record.state, outcome=outcome)
        self._teller.tell(state=LEFT, how=how, exit_code=code)
        kubernetes.last_word(os.environ, outcome)
        self._recorded.set()

    def _note_tiers(self, cursor: Cursor) -> None:
        """What was not there yet is copied: the record says where it is."""
        snapshot, _ = self._last_save.standing(cursor)
        tiers, outcome = self._last_save.holding(snapshot), self.log.record.outcome
        if outcome is not None and tiers != outcome["tiers"]:
            self.log.change(outcome={**outcome, "tiers": tiers})

    def _ask_to_be_queued_again(self, reason: str) -> None:
        """In a Slurm job; a script that goes on after the stop decides for itself."""
        requeue = Requeue.of(os.environ)
        if requeue is None or self._options.requeue == "never" or self._options.on_stop != "exit":
            return
        # From here on there is nothing left to lose: neither here nor outside is time kept, since
        # the job counts as completed if what lingers is ended before Slurm does it.
        self._watch.deadline.met()
        self._teller.tell(grace_s=None)
        if self._channel.world.rank == 0:
            requeue.ask(reason)
        self._barrier("asked", ASKED_WITHIN_S)

    def _survived(self) -> None:
        if self.survival is not None:
            self.survival.close(left=True)

    def _barrier(self, name: str, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        try:
            self._channel.barrier(name, timeout_s)
        except NoAgreement as error:
            logger.warning("leaving without the others: %s", error.message)

    def _stop_watching(self, *, leaves: bool = False) -> None:
        self._watch.end(leaves=leaves)
        for problem in self._watch.watcher.problems:
            logger.warning("while watching: %s", problem)
        self._barrier("gone")  # the process that holds the store leaves last


def exit_soon(code: int, seconds: float) -> None:
    """End this process so many seconds from now, unless it has ended before."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()
