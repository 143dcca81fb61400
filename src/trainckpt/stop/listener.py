"""Receive notices from the Checkpointer's construction to the attempt's end, and log them.

construct   signals are received and stored: the ranks cannot agree on anything yet
start       the attempt is claimed, so all ranks are there: notices open rounds from now on,
            and decisions before the first boundary take effect there
end         the final count is published, threads and handlers are taken down

Each notice is logged on receipt, since a stop takes effect only at a later boundary. A user without
a reply presses Ctrl-C again, and the second one ends the process at once, unsaved. The resume point
is logged here too.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.attempt.log import logger
from trainckpt.attempt.rank_status import LEFT
from trainckpt.format.attempt_record import STOPPED
from trainckpt.notice import OF_MACHINE, Notice
from trainckpt.preemption import gpu_health
from trainckpt.preemption.polling import PollingSource
from trainckpt.preemption.signals import SignalSource
from trainckpt.ranks.watcher import Watcher
from trainckpt.resume.resume import still_alive
from trainckpt.run_directory import run_url
from trainckpt.stop.deadline import Deadline, granted_s, margin_s
from trainckpt.stop.notice_sources import check_notices, further_sources
from trainckpt.stop.progress_report import ProgressReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.attempt.rank_status import RankStatusWriter
    from trainckpt.format.exactness import Exactness
    from trainckpt.notice import NoticeSource
    from trainckpt.ranks.boundary_gate import BoundaryGate
    from trainckpt.ranks.store import RankStore
    from trainckpt.resume.resume import ResumePoint
    from trainckpt.save.estimates import SaveEstimator
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Place


STOPPING = "stopping at the next boundary shared by all ranks"
LATE = "training is already finished and saved"


class LoggedNoticeSource:
    """Pass every call on to `source` and log each reason once. Watcher thread.

    Attributes:
        asked: The most urgent notice: its reason, and the end of its grace period on the monotonic
            clock (inf: no time limit given). None: no notice yet.
        is_late: Training has ended, so no boundary follows.
    """

    def __init__(
        self, source: NoticeSource, on_notice: Callable[[], object] = lambda: None
    ) -> None:
        self._source = source
        self._on_notice = on_notice
        self._said: set[str] = set()
        self.asked: tuple[str, float] | None = None
        self.is_late = False

    def start(self) -> None:
        """See `NoticeSource`."""
        self._source.start()

    def fileno(self) -> int | None:
        """See `NoticeSource`."""
        return self._source.fileno()

    def poll(self) -> Sequence[Notice]:
        """Return the notices since the last call, and log each new reason."""
        notices = self._source.poll()
        for notice in notices:
            left_s = math.inf if notice.seconds_left is None else notice.seconds_left
            ends_s = time.monotonic() + left_s
            if self.asked is None or ends_s < self.asked[1]:
                self.asked = notice.reason, ends_s
            if notice.reason not in self._said:
                self._said.add(notice.reason)
                self._on_notice()
                logger.info("%s: %s", notice.reason, LATE if self.is_late else STOPPING)
        return notices

    @property
    def says_machine_goes(self) -> bool:
        """Return True if the source reported this machine as leaving or unhealthy."""
        return any(reason.startswith(OF_MACHINE) for reason in tuple(self._said))

    def training_ended(self) -> None:
        """Log later notices as late: no boundary follows."""
        self.is_late = True

    def forget(self) -> None:
        """Forget all notices after a stop is undone: the same reason is logged again. Any
        thread."""
        self._said, self.asked = set(), None

    def stop(self) -> None:
        """See `NoticeSource`."""
        self._source.stop()


def say_where(
    tier: Place, beginning: ResumePoint, exactness: Exactness, registry: Registry
) -> None:
    """Log the resume point, its exactness, the snapshots passed over and a concurrent attempt."""
    if alive := still_alive(tier, beginning.record.attempt):
        logger.warning(alive)
    for refused, reason in (beginning.refused or {}).items():
        logger.info("skipped snapshot %s: %s", refused, reason)
    where = f"{tier.url}, attempt {beginning.record.attempt}"
    if beginning.manifest is None:
        why = f" ({beginning.why_fresh})" if beginning.why_fresh else ""
        logger.info("%s: begins at step 0%s", where, why)
        return
    name, cursor = beginning.manifest.name, beginning.cursor
    logger.info("%s: resumed from %s, %s: %s", where, name, cursor, exactness.line)
    for reason in exactness.reasons:
        logger.info("not bitwise: %s", reason)
    _say_changed(registry)
    _say_added(registry)


def say_how_it_stops(stops: str, grace_s: float | None, lost: Sequence[str]) -> None:
    """Log where a stop falls, its grace period, and the features missing without a supervisor."""
    within = "" if grace_s is None else f", within {grace_s:g} s of a signal"
    logger.debug("a stop falls on %s%s", stops, within)
    if lost:
        logger.info(
            'running without a supervisor: %s (use "trainckpt run")',
            "; ".join(lost),
        )


def _say_changed(registry: Registry) -> None:
    """Warn of optimizer options that differ from the saved run, and log the value in force."""
    for optimizer in registry.optimizers:
        if optimizer.changed:
            logger.warning(
                "%s: %s. The saved value is used, unless the script sets it during training. "
                "For the new value, set it in the loop, once a batch is there, or begin a new run "
                "with init_from",
                optimizer.name,
                ", ".join(optimizer.changed[:5]),
            )


def _say_added(registry: Registry) -> None:
    """Log the optimizers given parameter groups that the script has not added yet."""
    for optimizer in registry.optimizers:
        if optimizer.added:
            logger.debug(
                "%s got %d parameter groups from the snapshot. If the script adds them again "
                "before the first batch, the call is ignored",
                optimizer.name,
                optimizer.added,
            )


EARLY_LOOK_S = 0.05
EARLY_LIMIT_S = 30.0
WAITS_S = 5.0  # from an agreed stop to the warning about a late boundary


class NoticeListener:
    """Listener for every notice that may stop this attempt.

    Attributes:
        watcher: Set by `start`.
        grace_s: Grace period of a signal; None: not stated.
        deadline: Deadline of the agreed stops.
    """

    watcher: Watcher

    def __init__(
        self,
        *,
        gate: BoundaryGate,
        tier: Place,
        estimator: SaveEstimator,
        options: Options,
        status_writer: RankStatusWriter,
        hard_exit: Callable[[str], object],
    ) -> None:
        """`hard_exit`: ends the process if the ranks could not agree on a stop, or at a missed
        deadline; called with the reason."""
        check_notices(options.notices)
        self.deadline = Deadline(lambda: hard_exit("the deadline has passed"))
        self._hard_exit = hard_exit
        self._gate, self._tier = gate, tier
        self._estimator = estimator
        self.grace_s = options.grace or granted_s()
        self._options = options
        self._status_writer = status_writer
        self._heartbeat: Heartbeat | None = None
        self._signals = SignalSource(seconds_left=self.grace_s)
        self._signals.start()
        self._heard = LoggedNoticeSource(self._signals)
        self._early = _EarlySignalBuffer(
            self._heard,
            early_limit_s(self.grace_s),
            partial(_leave_early, status_writer, options.exit_code),
        )
        self._early.start()
        self._started = False
        self._patience = _SlowStopWarning()
        self._sources: list[LoggedNoticeSource] = []
        self._polled: list[PollingSource] = []
        self._nvml_opens = 0
        weakref.finalize(self, _stop_listening, self._early, self._signals)

    def start(self, attempt: int, channel: RankStore, *, is_first: bool) -> None:
        """Begin to act on notices. Main thread, all ranks; `is_first` on rank 0."""
        say = logger.warning if is_first else _nothing
        world = channel.world
        notices = run_url.notice_source(
            self._tier, attempt, say, is_first_of_host=world.local_rank == 0
        )
        others = further_sources(self._options, self.grace_s, world)
        self._polled = [source for source in others if isinstance(source, PollingSource)]
        others += [notices] if notices is not None else []
        others += [ProgressReporter(self._estimator.timings, world.rank)]
        sources = [self._heard, *(LoggedNoticeSource(source, self._was_asked) for source in others)]
        self._sources = sources
        if is_first:
            self._heartbeat = Heartbeat(self._tier, attempt)
            self._heartbeat.start()
            weakref.finalize(self, self._heartbeat.stop)
        self.watcher = Watcher(
            self._gate,
            channel,
            sources,
            mode=self._estimator.mode,
            on_stop=self._stop_agreed,
            on_failed_stop=self._hard_exit,
            on_lost=self._lost,
        )
        early = self._early.stop()
        self.watcher.start()
        self._started = True
        for notice in early:
            self.watcher.request(notice)
        if not self._signals.available:
            logger.warning("cannot listen to signals: %s", self._signals.why)
        for replaced in self._signals.replaced:
            logger.debug("%s is replaced during the run", replaced)

    @property
    def machine_goes(self) -> bool:
        """Return True if this host itself was announced to leave; other hosts see only the
        stop's reason."""
        return any(source.says_machine_goes for source in self._sources)

    def finishes(self) -> None:
        """End the listening for stops after the last commit: no deadline ends this process any
        more. `asked_to_leave` reports later requests."""
        self.reached()
        for source in self._sources:
            source.training_ended()
        self.watcher.publish_final()
        self.deadline.met()

    def asked_to_leave(self) -> tuple[str, float | None] | None:
        """Return the most urgent request for this rank to leave: reason and seconds left; None:
        no request."""
        asked = [each for source in self._sources if (each := source.asked) is not None]
        if not asked:
            return None
        reason, ends_s = min(asked, key=lambda each: each[1])
        left_s = ends_s - time.monotonic()
        return reason, None if left_s == math.inf else max(left_s - margin_s(left_s), 0.0)

    def check(self) -> None:
        """Put the signals' descriptor back at a boundary, if other code took it."""
        self._signals.check()

    def forget_stop(self, round_: int) -> None:
        """Undo the stop of this round on all ranks, after a restore at its boundary."""
        self.deadline.forget()
        self._patience = _SlowStopWarning()
        for source in self._sources:
            source.forget()
        self.watcher.forget_stop(round_)

    def suspend(self) -> None:
        """Close NVML and the notices' connections before a process dump.

        Raises:
            TimeoutError: one of them did not answer.
        """
        for source in self._polled:
            source.suspend()
        self._nvml_opens = gpu_health.shut_down()

    def resume(self) -> None:
        """Open again after a restore everything that `suspend` closed."""
        gpu_health.open_again(self._nvml_opens)
        for source in self._polled:
            source.resume()

    def end(self, *, leaves: bool = False) -> None:
        """Stop listening; no other rank waits for this one. May be repeated.

        `leaves`: the process ends now, by its own exit code, whatever signals come.
        """
        if leaves:
            self._signals.leaves()
        if not self._started:
            _stop_listening(self._early, self._signals)
            return
        self.deadline.met()
        self.reached()
        self.watcher.publish_final()
        self.watcher.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _was_asked(self) -> None:
        """Report the notice to the supervisor, which cannot see it and must not restart the run
        after it."""
        self._status_writer.update(asked=True)

    def _lost(self, why: str) -> None:
        logger.error(
            "%s. Training continues, but the ranks can no longer agree on saves by time or by "
            "ckpt.save(), and a stop ends this process with 71. Restart the run soon",
            why,
        )

    def _stop_agreed(self, seconds_left: float | None) -> None:
        """Start the deadline. Watcher thread."""
        self.deadline.tighten(seconds_left)
        self._patience.begin()
        left_s = self.deadline.left_s()
        if left_s is not None:
            within_s = self._estimator.tighten_after_s(left_s)
            timer = threading.Timer(within_s, self._settle_for_less)
            timer.daemon = True
            timer.start()

    def reached(self) -> None:
        """Cancel the slow-boundary timer at the boundary of the stop, or at the end."""
        self._patience.end()

    def _settle_for_less(self) -> None:
        """Accept a micro-batch boundary if the window's end would come too late by now."""
        left_s = self.deadline.left_s()
        if left_s is not None and left_s > 0:
            notice = Notice("the deadline is near", mode="micro-batch", seconds_left=left_s)
            self.watcher.request(notice)


class _EarlySignalBuffer(threading.Thread):
    """Store notices until the watcher runs; a second interrupt acts at once.

    A Checkpointer that does not begin within a limit after a notice would swallow it for good.
    """

    def __init__(
        self, source: LoggedNoticeSource, limit_s: float, leave: Callable[[str], None]
    ) -> None:
        super().__init__(name="trainckpt-early", daemon=True)
        self._source, self._limit_s, self._leave = source, limit_s, leave
        self._notices: list[tuple[float, Notice]] = []
        self._stopping = threading.Event()
        self._waker, self._woken = socket.socketpair()

    def run(self) -> None:
        descriptor = self._source.fileno()
        if descriptor is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                ready, now_s = selector.select(EARLY_LOOK_S), time.monotonic()
                if any(key.fileobj is self._woken for key, _ in ready):
                    self._woken.recv(1)  # sent by a forked process at its end, if not by `stop`
                if any(key.fd == descriptor for key, _ in ready):
                    self._notices += [(now_s, notice) for notice in self._source.poll()]
                elif self._notices and now_s - self._notices[0][0] > self._limit_s:
                    self._leave(self._notices[0][1].reason)

    def stop(self) -> list[Notice]:
        """Stop the thread and return the notices received."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._waker.send(b"\0")  # else a resume would wait for its next poll
        self.join()
        self._waker.close()
        self._woken.close()
        return [_aged(notice, time.monotonic() - at_s) for at_s, notice in self._notices]


class _SlowStopWarning:
    """Log, a while after an agreed stop, a main thread that waits for processes which the signal
    may have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._over = False

    def begin(self) -> None:
        """Start the timer; only the first call counts."""
        with self._lock:
            if self._timer is None and not self._over:
                self._timer = threading.Timer(WAITS_S, _say_for_what_main_waits)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Cancel the timer and join its thread. May be repeated."""
        with self._lock:
            self._over, timer = True, self._timer
        if timer is not None:
            timer.cancel()
            timer.join()


def _say_for_what_main_waits() -> None:
    """Log a pool that the training thread waits for: a task whose worker died never returns.

    Plain Python would have died of the signal too.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("multiprocessing.", "concurrent.futures")):
            logger.warning(
                "boundary not reached yet: the training thread waits in %s. A SIGTERM to the whole "
                "process group also ends pool workers, and their results never come",
                module,
            )
            return
        frame = frame.f_back


def _leave_early(status_writer: RankStatusWriter, code: int, reason: str) -> None:
    """Exit after a stop request for a run that does not begin: nothing was trained."""
    logger.warning("%s: leaving before the run has begun", reason)
    status_writer.update(state=LEFT, how=STOPPED, exit_code=code)
    os._exit(code)


def early_limit_s(grace_s: float | None) -> float:
    """Return how long after a notice a run may take to begin, in seconds."""
    return EARLY_LIMIT_S if grace_s is None else min(EARLY_LIMIT_S, grace_s / 2)


def _aged(notice: Notice, seconds: float) -> Notice:
    left = notice.seconds_left
    return notice if left is None else replace(notice, seconds_left=max(left - seconds, 0.0))


def _nothing(_: str) -> None:
    """Log nothing: rank 0 does."""


def _stop_listening(early: _EarlySignalBuffer, signals: SignalSource) -> None:
    early.stop()
    signals.stop()
