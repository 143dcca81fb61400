"""End an attempt in one of four ways, and record how it ended.

    stop      all ranks agreed: snapshot; the processes may be dumped here, and continue later
              (`dump_pause`); else record, barrier, workers killed, `Stopped`
    finish    the script is done: final snapshot, barrier, record; then copies to slower tiers,
              until a notice asks the process to leave
    abandon   an exception: the final count is published, so that others need not wait for this
              rank; record. No barrier, no snapshot: the state may be anything
    cut short the ranks could not agree, or a deadline has come: record, and exit, any thread

The record is written after the snapshot is committed and before the process ends, because launchers
swallow exit codes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import exit_code_of, logger
from trainckpt.attempt.status_files import LEFT, RETURNED
from trainckpt.data.worker import survive_worker_deaths
from trainckpt.errors import NoAgreement, Stopped, TrainckptError, UnusableSnapshot
from trainckpt.format.attempt_record import ENDED, FAILED, FINISHED, KILLED, STOPPED
from trainckpt.preemption import kubernetes
from trainckpt.preemption.slurm import COMMAND_S
from trainckpt.stop.lost_parent import OF_ONE_HOST
from trainckpt.stop.requeue import LINGER_S, Requeue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.attempt.time_keeper import TimeKeeper
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.decision import Decision
    from trainckpt.ranks.store import RankStore
    from trainckpt.resume.exactness_report import ResumeReport
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.schedule import SaveRequests
    from trainckpt.stop.dump_pause import DumpPause
    from trainckpt.stop.final_save import FinalSave
    from trainckpt.stop.hard_exit import HardExit
    from trainckpt.stop.notice_listener import NoticeListener
    from trainckpt.stop.survivor_setup import SurvivorSetup


BARRIER_TIMEOUT_S = 60.0
REQUEUED_WITHIN_S = LINGER_S + 2 * COMMAND_S + 30.0
EXIT_AFTER_S = 5.0
RECORD_WITHIN_S = 2.0
UNRECORDED_S = 0.2  # of leaving, not worth another write
RECORDED = 20  # parts named in a record, the weakest first
SAVE_IN_FLIGHT_S = 5.0  # wait after an exception for a nearly finished save


class Shutdown:
    """End one attempt, once.

    Attributes:
        stopped: True if it ended by an agreed stop.
        record_writer: The attempt's record.
    """

    def __init__(
        self,
        *,
        options: Options,
        channel: RankStore,
        saver: SaveCoordinator,
        final_save: FinalSave,
        listener: NoticeListener,
        hard_exit: HardExit,
        record_writer: RecordWriter,
        times: TimeKeeper,
        report: ResumeReport,
        status_writer: RankStatusWriter,
        requests: SaveRequests,
        loaders: Sequence[tuple[object, TrackedLoader]],
        where: Callable[[], Cursor],
        survival: SurvivorSetup | None = None,
        dump_pause: DumpPause | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            options, channel, saver, final_save, listener, record_writer, times, report,
                status_writer, requests: Of the attempt.
            hard_exit: Exits of background threads; each is recorded from now on.
            loaders: The owner's own list: a loader may be registered later.
            where: Returns the cursor of the run.
            survival: Notified of the attempt's end: an orderly exit is not a lost rank.
            dump_pause: Permits a process dump at a stop; None: no dumps.
        """
        self._left = self.stopped = False
        self._pid = os.getpid()
        self._survival = survival
        self._dump_pause = dump_pause
        self.record_writer = record_writer
        self._options = options
        self._channel, self._report = channel, report
        self._saver, self._final_save = saver, final_save
        self._listener = listener
        self._status_writer = status_writer
        self._requests = requests
        self._loaders = loaders
        self._where = where
        self._ending = threading.Lock()
        self._recorded = threading.Event()
        self._begun_s = time.monotonic()
        self._times, self._recorded_s = times, 0.0
        self._code = options.exit_code
        hard_exit.record_first(self.cut_short)

    @property
    def left(self) -> bool:
        """Return True if the attempt has ended; always True in a process forked by the script,
        which is no part of the attempt."""
        return self._left or os.getpid() != self._pid

    @survive_worker_deaths()
    def stop(self, cursor: Cursor, due: Decision) -> bool:
        """Stop here on all ranks. Raise `Stopped`, or return False with `on_stop="return"`.

        Returns True after the processes were dumped here and restored: training goes on.
        """
        self._listener.end_boundary_wait()
        reason, dump_pause = due.notice.reason, self._dump_pause
        may_pause = dump_pause is not None and dump_pause.is_requested
        if not may_pause:
            self._end_survival()
            self._times.begin_leaving()
        self._final_save.save(cursor, reason, self._listener.deadline, stops=True)
        snapshot, lost = self._final_save.standing(cursor)
        if dump_pause is not None and dump_pause.here(due.round, None if lost else snapshot):
            self._channel = self._final_save.go_on(self._channel)
            self._report.reconnect(self._channel)
            self.record_writer.change()  # as another attempt: its time begins anew
            return True
        self._times.begin_leaving()
        if may_pause:
            self._end_survival()
        self._code = self._options.exit_code if snapshot else UnusableSnapshot.exit_code
        if self._channel.world.rank == 0:
            where = f"saved {snapshot}"
            if lost:
                where = f"not saved, {snapshot} stands, {lost} micro-batches are lost"
            logger.info("stopped by %s at %s: %s", reason, cursor, where)
        self.stopped = True
        if not reason.startswith(OF_ONE_HOST):
            self._status_writer.update(asked=True)  # it may have reached other ranks alone
        self._end(STOPPED, cursor, self._code, reason)
        self._barrier("stopped")
        for _, loader in self._loaders:
            loader.shutdown()
        self._final_save.flush(reason, self._listener.deadline)
        self._record_tiers(cursor)
        self._saver.close(keep=True)
        self._requeue(reason)
        exits = self._options.on_stop == "exit"
        self._stop_watching(exits=exits)
        if not exits:
            self._status_writer.update(state=RETURNED)
            return False
        exit_soon(self._code, EXIT_AFTER_S)
        raise Stopped(self._code, snapshot, reason)

    def finish(self, cursor: Cursor) -> None:
        """End the attempt after the script is done.

        Raises:
            SaveFailed: the final snapshot did not commit; raised after all ranks left in order.
        """
        self._end_survival()
        self._times.begin_leaving()
        failure = self._final_save.save(cursor, "final", self._listener.deadline)
        self._listener.finish()  # committed: whatever is decided from now on is ignored
        self._barrier("finished")
        code = failure.exit_code if failure else 0
        self._end(FAILED if failure else FINISHED, cursor, code, "final")
        self._final_save.flush_all(self._listener.leave_request)
        self._record_tiers(cursor)
        self._saver.close(keep=failure is not None)
        self._stop_watching()
        if failure:
            raise failure

    def abandon(self, error: BaseException | None, cursor: Cursor) -> None:
        """End the attempt on an exception that leaves the script."""
        if self.left:
            return
        if self._survival is not None:
            self._survival.after(error)
            self._survival.close(left=False)
        self._times.begin_leaving()
        with contextlib.suppress(NoAgreement):
            self._listener.watcher.publish_final()
        code = exit_code_of(error) if isinstance(error, SystemExit) else 1
        code = error.exit_code if isinstance(error, TrainckptError) else code
        self._saver.join(SAVE_IN_FLIGHT_S)
        self._saver.uploads.abandon()
        self._saver.close(keep=True)
        self._end(FAILED, cursor, code, repr(error)[:500])
        snapshot, lost = self._final_save.standing(cursor)
        if code == 0 and lost and self._channel.world.rank == 0:  # it may look like a normal end
            logger.warning(
                "the script left by sys.exit() at %s with %s unsaved micro-batches; a resume "
                "starts at %s. To save first, leave the loop with `break`, or call ckpt.close()",
                cursor,
                lost,
                snapshot or "step 0",
            )
        self._times.close()
        self._listener.end()

    def cut_short(self, why: str) -> None:
        """End this process now, wherever main is. Any thread."""
        code = self._code if self.left else NoAgreement.exit_code
        exit_soon(code, RECORD_WITHIN_S)  # against any later hang
        logger.error("%s: leaving at once; committed snapshots stand", why)
        with contextlib.suppress(Exception):
            self._end(KILLED, self._where(), NoAgreement.exit_code, why)
        self._recorded.wait(RECORD_WITHIN_S)  # main may have begun to record another end
        os._exit(self._code)

    def exit_now(self) -> None:
        """Exit the process: a boundary was reached after the script caught `Stopped`."""
        logger.warning("the script caught Stopped and continued; leaving now")
        os._exit(self._code)

    def _end(self, how: str, cursor: Cursor, code: int, reason: str) -> None:
        """Record how the attempt ended; the first call wins."""
        with self._ending:
            if self.left:
                return
            self._left, self._code = True, code
        self._times.begin_leaving()
        self._report.close()
        if how != KILLED:  # a store that does not answer must not hold up an end against time
            self._report.read_findings()
        self._requests.fail_waiting(how)
        snapshot, lost = self._final_save.standing(cursor)
        exactness = self._report.exactness
        outcome: dict[str, Any] = {
            "outcome": how,
            "snapshot": snapshot,
            "kind": "snapshot",
            "exactness": exactness.word,
            "lost_micro_batches": lost,
            "tiers": self._final_save.tiers_with(snapshot),
            "seconds": round(time.monotonic() - self._begun_s, 3),
            "exit_code": code,
            "reason": reason,
        }
        if exactness.weaker:
            outcome["restored"] = [part.to_json() for part in exactness.weaker[:RECORDED]]
        if self._final_save.skipped:
            outcome["skipped"] = self._final_save.skipped
        if self._final_save.chosen:
            outcome["chosen"] = self._final_save.chosen
        if self._dump_pause is not None and self._dump_pause.why_not:
            outcome["no_dump"] = self._dump_pause.why_not
        self.record_writer.change(
            state=ENDED if how != FAILED else self.record_writer.record.state, outcome=outcome
        )
        self._recorded_s = time.monotonic()
        self._status_writer.update(state=LEFT, how=how, exit_code=code)
        kubernetes.last_word(os.environ, outcome)
        self._recorded.set()

    def _record_tiers(self, cursor: Cursor) -> None:
        """Record the tiers that received the snapshot since the record was written, and the time
        that this took."""
        snapshot, _ = self._final_save.standing(cursor)
        tiers, outcome = self._final_save.tiers_with(snapshot), self.record_writer.record.outcome
        took_s = time.monotonic() - self._recorded_s
        if outcome is not None and (tiers != outcome["tiers"] or took_s > UNRECORDED_S):
            self.record_writer.change(outcome={**outcome, "tiers": tiers})
        self._times.close()

    def _requeue(self, reason: str) -> None:
        """Ask Slurm to requeue the job; a script that runs on after the stop decides for itself."""
        requeue = Requeue.of(os.environ)
        if requeue is None or self._options.requeue == "never" or self._options.on_stop != "exit":
            return
        # Nothing is left to lose from here on. No deadline applies, here or outside, since
        # the job counts as completed if a lingering process ends before Slurm kills it.
        self._listener.deadline.end()
        self._status_writer.update(grace_s=None)
        if self._channel.world.rank == 0:
            requeue.ask(reason)
        self._barrier("asked", REQUEUED_WITHIN_S)

    def _end_survival(self) -> None:
        if self._survival is not None:
            self._survival.close(left=True)

    def _barrier(self, name: str, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        try:
            self._channel.barrier(name, timeout_s)
        except NoAgreement as error:
            logger.warning("leaving without the other ranks: %s", error.message)

    def _stop_watching(self, *, exits: bool = False) -> None:
        self._listener.end(exits=exits)
        for problem in self._listener.watcher.problems:
            logger.warning("notice watcher: %s", problem)
        self._barrier("gone")  # the process with the store leaves last


def exit_soon(code: int, seconds: float) -> None:
    """End this process so many seconds from now, unless it has ended before.

    On a host without a thread left, only the process itself ends it.
    """
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    with contextlib.suppress(RuntimeError):
        timer.start()
