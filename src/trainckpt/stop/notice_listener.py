"""Receive notices from the Checkpointer's construction to the attempt's end, and log them.

construct   signals are received and stored: the ranks cannot agree on anything yet
start       the attempt is claimed, so all ranks are there: notices open rounds from now on,
            and decisions before the first boundary take effect there
end         the final count is published, threads and handlers are taken down

Each notice is logged on receipt, since a stop takes effect only at a later boundary. A user without
a reply presses Ctrl-C again, and the second one ends the process at once, unsaved.
"""

from __future__ import annotations

import math
import os
import selectors
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.attempt.log import logger
from trainckpt.attempt.status_files import LEFT
from trainckpt.format.attempt_record import STOPPED
from trainckpt.notice import OF_MACHINE, Notice
from trainckpt.preemption import gpu_health
from trainckpt.preemption.polling import PollingSource
from trainckpt.preemption.signals import SignalSource
from trainckpt.ranks.notice_watcher import NoticeWatcher, end_with_71
from trainckpt.ranks.threads import SelfPipe
from trainckpt.stop.deadline import Deadline, granted_s, margin_s
from trainckpt.stop.notice_sources import (
    ProgressReporter,
    check_notices,
    further_sources,
    run_source,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.notice import NoticeSource
    from trainckpt.ranks.boundary_gate import BoundaryGate
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.estimates import Timings
    from trainckpt.stop.stop_mode import StopModeChooser
    from trainckpt.storage.base import RunTier


STOPPING = "stopping at the next boundary shared by all ranks"
LATE = "training is already finished and saved"


class LoggedNoticeSource:
    """Pass every call on to `source` and log each reason once. Watcher thread.

    Attributes:
        most_urgent: The most urgent notice: its reason, and the end of its grace period on the
            monotonic clock (inf: no time limit given). None: no notice yet.
        is_late: Training has ended, so no boundary follows: later notices are logged as late.
    """

    def __init__(
        self, source: NoticeSource, on_notice: Callable[[], object] = lambda: None
    ) -> None:
        self._source = source
        self._on_notice = on_notice
        self._logged: set[str] = set()
        self.most_urgent: tuple[str, float] | None = None
        self.is_late = False
        self.start, self.fileno, self.stop = source.start, source.fileno, source.stop

    def poll(self) -> Sequence[Notice]:
        """Return the notices since the last call, and log each new reason."""
        notices = self._source.poll()
        for notice in notices:
            left_s = math.inf if notice.seconds_left is None else notice.seconds_left
            ends_s = time.monotonic() + left_s
            if self.most_urgent is None or ends_s < self.most_urgent[1]:
                self.most_urgent = notice.reason, ends_s
            if notice.reason not in self._logged:
                self._logged.add(notice.reason)
                self._on_notice()
                logger.info("%s: %s", notice.reason, LATE if self.is_late else STOPPING)
        return notices

    @property
    def says_machine_goes(self) -> bool:
        """Return True if the source reported this machine as leaving or unhealthy."""
        return any(reason.startswith(OF_MACHINE) for reason in tuple(self._logged))

    def forget(self) -> None:
        """Forget all notices after a stop is undone: the same reason is logged again. Any
        thread."""
        self._logged, self.most_urgent = set(), None


EARLY_LOOK_S = 0.05
EARLY_LIMIT_S = 30.0
WAITS_S = 5.0  # from an agreed stop to the warning about a late boundary


class HardExit:
    """End this process at once, wherever main is. Any thread.

    Notices are received, and ranks watched, before an attempt can record its end: until its
    `Shutdown` is built the process only exits with 71.
    """

    def __init__(self) -> None:
        self._end: Callable[[str], object] = end_with_71

    def __call__(self, why: str) -> None:
        """End the process for this reason."""
        self._end(why)

    def record_first(self, cut_short: Callable[[str], object]) -> None:
        """End the process by this function from now on; it records the end before."""
        self._end = cut_short


class NoticeListener:
    """Listener for every notice that may stop this attempt.

    Attributes:
        watcher, stop_mode: Set by `start`.
        hard_exit: Ends the process if the ranks could not agree on a stop, or at a missed deadline.
        grace_s: Grace period of a signal; None: not stated.
        deadline: Deadline of the agreed stops.
    """

    watcher: NoticeWatcher
    stop_mode: StopModeChooser

    def __init__(
        self,
        *,
        gate: BoundaryGate,
        tier: RunTier,
        timings: Timings,
        options: Options,
        status_writer: RankStatusWriter,
    ) -> None:
        check_notices(options.notices)
        hard_exit = self.hard_exit = HardExit()
        self.deadline = Deadline(lambda: hard_exit("the deadline has passed"))
        self._gate, self._tier = gate, tier
        self._timings = timings
        self.grace_s = options.grace or granted_s()
        self._options = options
        self._status_writer = status_writer
        self._heartbeat: Heartbeat | None = None
        self._signals = SignalSource(seconds_left=self.grace_s)
        self._signals.start()
        self._logged_signals = LoggedNoticeSource(self._signals)

        def leave(reason: str) -> None:
            logger.warning("%s: leaving before the run has begun", reason)
            status_writer.update(state=LEFT, how=STOPPED, exit_code=options.exit_code)
            os._exit(options.exit_code)

        limit_s = early_limit_s(self.grace_s)
        self._early = _EarlySignalBuffer(self._logged_signals, limit_s, leave)
        self._early.start()
        self._started = False
        self._slow_stop = _SlowStopWarning()
        self._sources: list[LoggedNoticeSource] = []
        self._polled: list[PollingSource] = []
        self._nvml_opens = 0
        weakref.finalize(self, _stop_listening, self._early, self._signals)

    def start(self, attempt: int, channel: RankStore, stop_mode: StopModeChooser) -> None:
        """Begin to act on notices. Main thread, all ranks."""
        self.stop_mode = stop_mode
        world = channel.world
        notices = run_source(
            self._tier,
            attempt,
            logger.warning if world.rank == 0 else (lambda _: None),
            is_first_of_host=world.local_rank == 0,
        )
        others = further_sources(self._options, self.grace_s, world)
        self._polled = [source for source in others if isinstance(source, PollingSource)]
        others += [notices] if notices is not None else []
        others += [ProgressReporter(self._timings, world.rank)]

        def report() -> None:  # the supervisor cannot see it, and must not restart the run after it
            self._status_writer.update(asked=True)

        self._sources = [
            self._logged_signals,
            *(LoggedNoticeSource(source, report) for source in others),
        ]
        if world.rank == 0:
            self._heartbeat = Heartbeat(self._tier, attempt)
            self._heartbeat.start()
            weakref.finalize(self, self._heartbeat.stop)
        self.watcher = NoticeWatcher(
            self._gate,
            channel,
            self._sources,
            mode=stop_mode.mode,
            on_stop=self._on_stop,
            on_failed_stop=self.hard_exit,
            on_lost=lambda why: logger.error(
                "%s. Training continues, but the ranks can no longer agree on saves by time or by "
                "ckpt.save(), and a stop ends this process with 71. Restart the run soon",
                why,
            ),
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

    def finish(self) -> None:
        """End the listening for stops after the last commit: no deadline ends this process any
        more. `leave_request` reports later requests."""
        self.end_boundary_wait()
        for source in self._sources:
            source.is_late = True
        self.watcher.publish_final()
        self.deadline.end()

    def leave_request(self) -> tuple[str, float | None] | None:
        """Return the most urgent request for this rank to leave: reason and seconds left; None:
        no request."""
        requests = [s.most_urgent for s in self._sources if s.most_urgent is not None]
        if not requests:
            return None
        reason, ends_s = min(requests, key=lambda request: request[1])
        left_s = ends_s - time.monotonic()
        return reason, None if left_s == math.inf else max(left_s - margin_s(left_s), 0.0)

    def check(self) -> None:
        """Put the signals' descriptor back at a boundary, if other code took it."""
        self._signals.check()

    def forget_stop(self, round_: int) -> None:
        """Undo the stop of this round on all ranks, after a restore at its boundary."""
        self.deadline.forget()
        self._slow_stop = _SlowStopWarning()
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

    def end(self, *, exits: bool = False) -> None:
        """Stop listening; no other rank waits for this one. May be repeated.

        `exits`: the process ends now, by its own exit code, whatever signals come.
        """
        if exits:
            self._signals.ignore_later()
        if not self._started:
            _stop_listening(self._early, self._signals)
            return
        self.deadline.end()
        self.end_boundary_wait()
        self.watcher.publish_final()
        self.watcher.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _on_stop(self, seconds_left: float | None) -> None:
        """Start the deadline of an agreed stop. Watcher thread."""
        self.deadline.tighten(seconds_left)
        self._slow_stop.begin()
        left_s = self.deadline.left_s()
        if left_s is not None:
            within_s = self.stop_mode.tighten_after_s(left_s)
            timer = threading.Timer(within_s, self._accept_micro_batch)
            timer.daemon = True
            timer.start()

    def end_boundary_wait(self) -> None:
        """Cancel the slow-boundary timer at the boundary of the stop, or at the end."""
        self._slow_stop.end()

    def _accept_micro_batch(self) -> None:
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
        self._wake = SelfPipe()

    def run(self) -> None:
        descriptor = self._source.fileno()
        if descriptor is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._stopping.is_set():
                ready, now_s = selector.select(EARLY_LOOK_S), time.monotonic()
                self._wake.drain()  # a forked process rings at its end too
                if any(key.fd == descriptor for key, _ in ready):
                    self._notices += [(now_s, notice) for notice in self._source.poll()]
                elif self._notices and now_s - self._notices[0][0] > self._limit_s:
                    self._leave(self._notices[0][1].reason)

    def stop(self) -> list[Notice]:
        """Stop the thread and return the notices received, with the time left by now."""
        self._stopping.set()
        self._wake.ring()  # else a resume would wait for its next poll
        self.join()
        self._wake.close()
        now_s = time.monotonic()
        return [
            notice
            if notice.seconds_left is None
            else replace(notice, seconds_left=max(notice.seconds_left - (now_s - at_s), 0.0))
            for at_s, notice in self._notices
        ]


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
                self._timer = threading.Timer(WAITS_S, _warn_of_pool)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Cancel the timer and join its thread. May be repeated."""
        with self._lock:
            self._over, timer = True, self._timer
        if timer is not None:
            timer.cancel()
            timer.join()


def _warn_of_pool() -> None:
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


def early_limit_s(grace_s: float | None) -> float:
    """Return how long after a notice a run may take to begin, in seconds."""
    return EARLY_LIMIT_S if grace_s is None else min(EARLY_LIMIT_S, grace_s / 2)


def _stop_listening(early: _EarlySignalBuffer, signals: SignalSource) -> None:
    early.stop()
    signals.stop()
