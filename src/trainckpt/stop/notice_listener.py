"""Receive notices from the Checkpointer's construction to the attempt's end.

construct   signals are received and stored: the ranks cannot agree on anything yet
start       the attempt is claimed, so all ranks are there: notices open rounds from now on,
            and decisions before the first boundary take effect there
end         the final count is published, threads and handlers are taken down

From a signal to the exit:

    SignalSource          makes it a notice; `EarlySignals` stores those before `start`
    LoggedNoticeSource    logs it at once, since a stop takes effect only at a later boundary
    NoticeWatcher         agrees with the other ranks on a stop; the deadline begins
    BoundaryGate          passes the decision to the training thread at that boundary
    Shutdown.stop         saves, records, and exits with the option `exit_code`
    HardExit              exits from another thread, if one of the steps does not come in time
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.attempt.launch import RAY, kind_of_launch
from trainckpt.attempt.live_status import LiveStatus, StopNow
from trainckpt.attempt.log import logger
from trainckpt.format.attempt_times import TIMES
from trainckpt.notice import Notice
from trainckpt.preemption import gpu_health
from trainckpt.preemption.polling import PollingSource
from trainckpt.preemption.signal_source import SignalSource
from trainckpt.ranks.notice_watcher import NoticeWatcher
from trainckpt.stop.deadline import Deadline, granted_s, margin_s
from trainckpt.stop.early_signals import EarlySignals
from trainckpt.stop.notice_sources import (
    LoggedNoticeSource,
    ProgressReporter,
    check_notices,
    further_sources,
    run_source,
)
from trainckpt.stop.slow_stop import SlowStopWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.metrics.publisher import MetricsPublisher
    from trainckpt.notice import NoticeSource
    from trainckpt.ranks.boundary_gate import BoundaryGate
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.estimates import Timings
    from trainckpt.stop.hard_exit import HardExit
    from trainckpt.stop.stop_mode import StopModeChooser
    from trainckpt.storage.base import RunTier


class NoticeListener:
    """Listener for every notice that may stop this attempt.

    Attributes:
        watcher, stop_mode: Set by `start`.
        grace_s: Grace period of a signal; None: not stated.
        deadline: Deadline of the agreed stops.
        metrics: Publishes metrics of the attempt; None: none are wanted, or not yet. Rank 0.
        complete_status: Adds to the status what the attempt's saves do, once there are any.
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
        hard_exit: HardExit,
        trainer_sources: Sequence[NoticeSource] = (),
    ) -> None:
        check_notices(options.notices)
        self._hard_exit = hard_exit
        self.deadline = Deadline(lambda: hard_exit("the deadline has passed"))
        self._gate, self._tier = gate, tier
        self._timings = timings
        self.grace_s = options.grace or granted_s()
        self._options = options
        self._trainer_sources = trainer_sources
        self._status_writer = status_writer
        self._heartbeat: Heartbeat | None = None
        self._signals = SignalSource(seconds_left=self.grace_s)
        self._signals.start()
        self._logged_signals = LoggedNoticeSource(self._signals)
        self._early = EarlySignals(
            self._logged_signals,
            grace_s=self.grace_s,
            status_writer=status_writer,
            exit_code=options.exit_code,
        )
        self._early.start()
        self._started = self._is_stopping = False
        self.metrics: MetricsPublisher | None = None
        self.complete_status: Callable[[LiveStatus], LiveStatus] = lambda status: status
        self._slow_stop = SlowStopWarning()
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
        others += [*self._trainer_sources, ProgressReporter(self._timings, world.rank)]

        def report() -> None:  # the supervisor cannot see it, and must not restart the run after it
            self._status_writer.update(asked=True)

        self._sources = [
            self._logged_signals,
            *(LoggedNoticeSource(source, report) for source in others),
        ]
        if world.rank == 0:
            beat = weakref.WeakMethod(self._beat)  # a beating heart keeps no run's model alive
            self._heartbeat = Heartbeat(
                self._tier, attempt, content=lambda: now() if (now := beat()) else {}
            )
            self._heartbeat.start()
            weakref.finalize(self, self._heartbeat.stop)
        self.watcher = NoticeWatcher(
            self._gate,
            channel,
            self._sources,
            mode=stop_mode.mode,
            on_stop=self._on_stop,
            on_failed_stop=self._hard_exit,
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
        if not self._signals.available and kind_of_launch(os.environ) != RAY:
            # A worker of Ray trains on another thread, and gets no signal but SIGKILL.
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
        self._is_stopping = False
        self._slow_stop = SlowStopWarning()
        for source in self._sources:
            source.forget()
        self.watcher.forget_stop(round_)

    def close_connections(self) -> None:
        """Close NVML, and the connections of notices and metrics, before a process dump.

        Raises:
            TimeoutError: one of them did not answer.
        """
        for source in self._polled:
            source.suspend()
        if self.metrics is not None:
            self.metrics.suspend()
        self._nvml_opens = gpu_health.shut_down()

    def reopen_connections(self) -> None:
        """Open again after a restore everything that `close_connections` closed."""
        gpu_health.open_again(self._nvml_opens)
        for source in self._polled:
            source.restart()
        if self.metrics is not None:
            self.metrics.resume()

    def end(self, *, exits: bool = False) -> None:
        """Stop listening; no other rank waits for this one. May be repeated.

        `exits`: the process ends now, by its own exit code, whatever signals come.
        """
        if exits:
            self._signals.ignore_later()
        if not self._started:
            _stop_listening(self._early, self._signals)
            return
        left_s = self.deadline.left_s()
        self.deadline.end()
        self.end_boundary_wait()
        self.watcher.publish_final()
        self.watcher.stop()
        if self.metrics is not None:
            self.metrics.close(left_s)
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def live_status(self) -> LiveStatus:
        """Return what the attempt does now. Any thread."""
        times = self._timings.times
        status = LiveStatus(written=time.time(), phase=times.phase)
        if self._is_stopping:
            request, left_s = self.leave_request(), self.deadline.left_s()
            status = replace(
                status,
                stop=StopNow(
                    reason=request[0] if request is not None else "",
                    seconds_left=None if left_s is None else max(left_s, 0.0),
                ),
            )
        return self.complete_status(status)

    def beat_soon(self) -> None:
        """Let the heartbeat tell at once what the attempt does now."""
        if self._heartbeat is not None:
            self._heartbeat.beat_soon()

    def _beat(self) -> dict[str, Any]:
        return {TIMES: self._timings.times.to_json(), **self.live_status().to_json()}

    def _on_stop(self, seconds_left: float | None) -> None:
        """Start the deadline of an agreed stop. Watcher thread."""
        self._is_stopping = True
        self.deadline.tighten(seconds_left)
        self.beat_soon()
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


def _stop_listening(early: EarlySignals, signals: SignalSource) -> None:
    early.stop()
    signals.stop()
