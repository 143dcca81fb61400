"""Watching for notices, from the Checkpointer's construction to the attempt's end.

construct   signals are heard and kept: the ranks cannot agree on anything yet
start       the attempt is claimed, so all ranks are there: notices open rounds from now on,
            and what is decided before the first boundary is acted on there
end         the final count is published, threads and handlers are taken down
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

from trainckpt.format.attempt import STOPPED
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.resuming.announce import Announced
from trainckpt.lifecycle.run.heartbeat import Heartbeat
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.told import LEFT
from trainckpt.lifecycle.stopping.deadline import Deadline, granted_s, margin_s
from trainckpt.lifecycle.stopping.notice_sources import check_notices, further_sources
from trainckpt.lifecycle.stopping.pace_told import PaceTeller
from trainckpt.preemption import nvml
from trainckpt.preemption.background import Background
from trainckpt.preemption.notice import Notice
from trainckpt.preemption.signals import SignalSource
from trainckpt.ranks.watcher import Watcher, end_with_71

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.lifecycle.deciding.outlook import Outlook
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.lifecycle.run.told import Teller
    from trainckpt.ranks.agreement import Agreement
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.places import Place

EARLY_LOOK_S = 0.05
EARLY_LIMIT_S = 30.0
WAITS_S = 5.0  # after a stop was agreed, nothing is said of a boundary that is not reached


class Watch:
    """Who may stop this attempt.

    Attributes:
        watcher: Set by `start`.
        grace_s: What a signal grants; None: nobody says.
        deadline: Of the stops that were agreed.
        on_failed: Called with the reason when the ranks could not agree on a stop, or a deadline
            has come; ends the process.
    """

    watcher: Watcher

    def __init__(
        self,
        agreement: Agreement,
        tier: Place,
        outlook: Outlook,
        options: Options,
        teller: Teller,
    ) -> None:
        check_notices(options.notices)
        self.deadline = Deadline(lambda: self._fail("the deadline has come"))
        self.on_failed: Callable[[str], object] = end_with_71
        self._agreement, self._tier = agreement, tier
        self._outlook = outlook
        self.grace_s = options.grace or granted_s()
        self._options = options
        self._teller = teller
        self._heartbeat: Heartbeat | None = None
        self._signals = SignalSource(seconds_left=self.grace_s)
        self._signals.start()
        self._heard = Announced(self._signals)
        self._early = _EarlyEars(
            self._heard,
            early_limit_s(self.grace_s),
            partial(_leave_early, teller, options.exit_code),
        )
        self._early.start()
        self._started = False
        self._patience = _Patience()
        self._sources: list[Announced] = []
        self._polled: list[Background] = []
        self._nvml_opens = 0
        weakref.finalize(self, _stop_listening, self._early, self._signals)

    def start(self, attempt: int, channel: Channel, *, is_first: bool) -> None:
        """Begin to act on notices. Main thread, all ranks; `is_first` on rank 0."""
        say = logger.warning if is_first else _nothing
        world = channel.world
        notices = place.notice_source(
            self._tier, attempt, say, is_first_of_host=world.local_rank == 0
        )
        others = further_sources(self._options, self.grace_s, world)
        self._polled = [source for source in others if isinstance(source, Background)]
        others += [notices] if notices is not None else []
        others += [PaceTeller(self._outlook.pace, world.rank)]
        sources = [self._heard, *(Announced(source, self._was_asked) for source in others)]
        self._sources = sources
        if is_first:
            self._heartbeat = Heartbeat(self._tier, attempt)
            self._heartbeat.start()
            weakref.finalize(self, self._heartbeat.stop)
        self.watcher = Watcher(
            self._agreement,
            channel,
            sources,
            mode=self._outlook.mode,
            on_stop=self._stop_agreed,
            on_failed_stop=self._fail,
            on_lost=self._lost,
        )
        early = self._early.stop()
        self.watcher.start()
        self._started = True
        for notice in early:
            self.watcher.request(notice)
        if not self._signals.available:
            logger.warning("signals are not heard: %s", self._signals.why)
        for replaced in self._signals.replaced:
            logger.info("%s is replaced while the run lasts", replaced)

    @property
    def machine_goes(self) -> bool:
        """Whether this host itself was told that it goes; others hear only why all stop."""
        return any(source.says_machine_goes for source in self._sources)

    def finishes(self) -> None:
        """The last snapshot is committed: nothing is stopped any more, and no deadline ends this
        process. What is asked for, `asked_to_leave` tells."""
        self.reached()
        for source in self._sources:
            source.is_late = True
        self.watcher.publish_final()
        self.deadline.met()

    def asked_to_leave(self) -> tuple[str, float | None] | None:
        """Why this rank was asked to leave and what is left until it has to be gone; None: it was
        not. Of several, the first to come."""
        asked = [each for source in self._sources if (each := source.asked) is not None]
        if not asked:
            return None
        reason, ends_s = min(asked, key=lambda each: each[1])
        left_s = ends_s - time.monotonic()
        return reason, None if left_s == math.inf else max(left_s - margin_s(left_s), 0.0)

    def check(self) -> None:
        """At each boundary: put the signals' descriptor back if somebody took it."""
        self._signals.check()

    def forget_stop(self, round_: int) -> None:
        """The stop of this round was undone, on all ranks: the processes have come back there."""
        self.deadline.forget()
        self._patience = _Patience()
        for source in self._sources:
            source.forget()
        self.watcher.forget_stop(round_)

    def suspend(self) -> None:
        """Before a process dump: close NVML and the connections that notices come by.

        Raises:
            TimeoutError: one of them did not answer.
        """
        for source in self._polled:
            source.suspend()
        self._nvml_opens = nvml.shut_down()

    def resume(self) -> None:
        """After a restore: open again what `suspend` closed."""
        nvml.open_again(self._nvml_opens)
        for source in self._polled:
            source.resume()

    def end(self, *, leaves: bool = False) -> None:
        """Listen no more; no other rank waits for this one. May be repeated.

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
        """The supervisor cannot see such a notice; it must not start the run again after it."""
        self._teller.tell(asked=True)

    def _lost(self, why: str) -> None:
        logger.error(
            "%s; training goes on, but no save by time or by ckpt.save() can be agreed on any "
            "more, and a stop will end this process with 71", why
        )  # fmt: skip

    def _fail(self, why: str) -> None:
        self.on_failed(why)

    def _stop_agreed(self, seconds_left: float | None) -> None:
        """Watcher thread: from now on the deadline is kept."""
        self.deadline.tighten(seconds_left)
        self._patience.begin()
        left_s = self.deadline.left_s()
        if left_s is not None:
            within_s = self._outlook.tighten_after_s(left_s)
            timer = threading.Timer(within_s, self._settle_for_less)
            timer.daemon = True
            timer.start()

    def reached(self) -> None:
        """Main has come to the boundary of the stop, or to the end."""
        self._patience.end()

    def _settle_for_less(self) -> None:
        """The window's end would come too late by now: a micro-batch has to do."""
        left_s = self.deadline.left_s()
        if left_s is not None and left_s > 0:
            notice = Notice("the deadline is near", mode="micro-batch", seconds_left=left_s)
            self.watcher.request(notice)


class _EarlyEars(threading.Thread):
    """Keeps the notices that come before the watcher runs; a second interrupt acts at once.

    A Checkpointer that does not begin within a limit after one would swallow it for good.
    """

    def __init__(self, source: Announced, limit_s: float, leave: Callable[[str], None]) -> None:
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
                    self._woken.recv(1)  # of a forked process that has ended, if not by `stop`
                if any(key.fd == descriptor for key, _ in ready):
                    self._notices += [(now_s, notice) for notice in self._source.poll()]
                elif self._notices and now_s - self._notices[0][0] > self._limit_s:
                    self._leave(self._notices[0][1].reason)

    def stop(self) -> list[Notice]:
        """What came until now."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._waker.send(b"\0")  # else a resume waited until it looks by itself
        self.join()
        self._waker.close()
        self._woken.close()
        return [_aged(notice, time.monotonic() - at_s) for at_s, notice in self._notices]


class _Patience:
    """Once the ranks have agreed on a stop: it is said if main still waits, a while later, for
    processes that the signal may have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._over = False

    def begin(self) -> None:
        """The first of several counts."""
        with self._lock:
            if self._timer is None and not self._over:
                self._timer = threading.Timer(WAITS_S, _say_for_what_main_waits)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """May be repeated; no thread of it is left then."""
        with self._lock:
            self._over, timer = True, self._timer
        if timer is not None:
            timer.cancel()
            timer.join()


def _say_for_what_main_waits() -> None:
    """A task of a pool whose worker has died never returns; plain Python would have died too."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("multiprocessing.", "concurrent.futures")):
            logger.warning(
                "the boundary is not reached yet: the training thread waits in %s. A signal to the "
                "whole process group, such as SIGTERM, ends such processes too, and what they were "
                "at never comes", module,
            )  # fmt: skip
            return
        frame = frame.f_back


def _leave_early(teller: Teller, code: int, reason: str) -> None:
    """A stop was asked for, and the run does not begin: nothing was trained, so just go."""
    logger.warning("%s: leaving; the run had not begun", reason)
    teller.tell(state=LEFT, how=STOPPED, exit_code=code)
    os._exit(code)


def early_limit_s(grace_s: float | None) -> float:
    """How long after a notice a run may take to begin."""
    return EARLY_LIMIT_S if grace_s is None else min(EARLY_LIMIT_S, grace_s / 2)


def _aged(notice: Notice, seconds: float) -> Notice:
    left = notice.seconds_left
    return notice if left is None else replace(notice, seconds_left=max(left - seconds, 0.0))


def _nothing(_: str) -> None:
    """Rank 0 has said it."""


def _stop_listening(early: _EarlyEars, signals: SignalSource) -> None:
    early.stop()
    signals.stop()
