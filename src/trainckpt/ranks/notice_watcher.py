"""Turn notices and calls of `save` into requests to all ranks, on two threads while main trains.

Order of events:

    a notice here         watch    opens the next round, publishes, sets every rank's bell
    a bell                answer   answers every round up to that one, in order
    all publications      the rank with the last one proposes the decision
    a decision            answer   reads it back, passes it to the boundary gate
    time is over          answer   proposes "failed"; a failed stop ends this process with 71

`watch` sleeps on the sources' descriptors and polls the others once a second; it never blocks in
the store, so that a second interrupt is seen. `answer` blocks in the store, on a connection of its
own, while no round is undecided. With one open it polls every few milliseconds, because it then has
deadlines to keep. A single rank does not `answer`: its decisions are immediate.

Threads: `start` and `stop` from the main thread (signals); `request`, `request_save` and
`publish_final` from any. Background threads: no collectives here.
"""

from __future__ import annotations

import atexit
import os
import selectors
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.ranks import threads
from trainckpt.ranks.decision import Decision, Publication, decide
from trainckpt.ranks.pending_requests import PendingRequests
from trainckpt.ranks.rounds import Rounds, Undecided, decide_within
from trainckpt.ranks.store import DAY_S
from trainckpt.ranks.threads import SelfPipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.notice import Mode, NoticeSource
    from trainckpt.ranks.boundary_gate import BoundaryGate
    from trainckpt.ranks.store import RankStore


LOOK_INTERVAL_S, STOP_WITHIN_S = 1.0, 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, RETRY_DECIDING_S = 0.001, 0.05, 0.5


def end_with_71(_: str) -> None:
    """End the process after a failed stop, wherever main is."""
    os._exit(NoAgreement.exit_code)


class NoticeWatcher:
    """Watcher threads of one rank. Sequence of calls: `start`, requests, `publish_final`, `stop`.

    Attributes:
        problems: Errors of sources and of the store, one sentence each, for the log.
    """

    def __init__(
        self,
        gate: BoundaryGate,
        channel: RankStore,
        sources: Sequence[NoticeSource] = (),
        *,
        mode: Callable[[float | None], Mode] = lambda _: "micro-batch",
        can_save: Callable[[], bool] = lambda: True,
        on_stop: Callable[[float | None], object] = lambda _: None,
        on_failed_stop: Callable[[str], object] = end_with_71,
        on_lost: Callable[[str], object] = lambda _: None,
        decision_timeout_s: float = 20.0,
    ) -> None:
        """Store the arguments; nothing runs before `start`.

        Args:
            gate: The boundary's side, this rank's.
            channel: Between the ranks, scoped to the attempt; one watcher per rank and scope.
            sources: Sources of notices.
            mode: Returns the mode of a notice without one, given the seconds left (None: unknown).
                Any thread; must not block.
            can_save: Returns True if a save could be taken now. Called from any thread; must not
                block and not raise.
            on_stop: Called with the seconds left after a stop is decided, before main learns of it.
            on_lost: Called with the reason when the store is gone: no more rounds.
            on_failed_stop: Called with the reason, from a watcher thread.
            decision_timeout_s: Seconds a round may stay undecided; half of the notice's
                `seconds_left` if that is less.
        """
        self.problems: list[str] = []
        self._gate, self._channel, self._world = gate, channel, channel.world
        self._sources = tuple(sources)
        self._mode = mode
        self._can_save = can_save
        self._on_stop = on_stop
        self._on_failed_stop = on_failed_stop
        self._on_lost = on_lost
        self._timeout_s = decision_timeout_s
        self._lock = threading.RLock()  # rounds and requests; held for no store call
        self._sending = threading.RLock()  # keeps publications in the order of their rounds
        self._pending = PendingRequests()
        self._answered = self._settled = self._forgotten = 0  # up to: here; by all; stops undone
        self._undecided: dict[int, Undecided] = {}
        self._outbox: deque[Publication] = deque()
        self._awaited_round = 1
        self._lost: NoAgreement | None = None
        self._running = self._left = False
        self._stopping = threading.Event()
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the sources and the threads. Main thread, once, the same on all ranks."""
        self._pid = os.getpid()
        self._wake = SelfPipe()
        for source in self._sources:
            source.start()
        loops = [self._watch]
        if self._world.size > 1:
            self._rounds = Rounds(self._channel.connection())
            self._bell_rounds = Rounds(self._channel.connection())
            loops.append(self._answer_rounds)
        self._running = True
        atexit.register(self._leave_at_exit)
        for loop in loops:
            thread = threads.thread(self._guarded, f"trainckpt-{loop.__name__.strip('_')}", loop)
            self._threads.append(thread)
            thread.start()

    def request(self, notice: Notice) -> None:
        """Ask all ranks for the notice's action. The caller's next boundary waits for the answer.

        A stop requested already, as strict or stricter, opens no round. A save requested while a
        round is undecided is merged with it if that becomes a save. A save requested while a
        decided one has still to be taken is that save (with a tag it is another one).
        """
        any_save_will_do = notice.action == "save" and notice.tag is None
        if any_save_will_do and self._gate.has_save_to_come():
            return
        mode = notice.mode or self._mode_of(notice.seconds_left)
        self._add(replace(notice, mode=mode))

    def request_save(self, number: int, tag: str | None = None) -> None:
        """Ask for the save of this rank's `number`-th `ckpt.save()`, counted from 1.

        Nothing happens if a round has decided that save already. While a round is undecided the
        request waits, and gets the next round unless the round decides that very save.
        """
        self._add(Notice("ckpt.save()", "save", "micro-batch", tag=tag, number=number))

    def forget_stop(self, round_: int) -> None:
        """Undo this round's stop on all ranks, and forget all rounds up to it, received or not."""
        with self._lock:
            self._forgotten = max(self._forgotten, round_)
            self._pending.forget_stop()
        self._gate.forget_stop(round_)

    def publish_final(self) -> None:
        """Publish this rank's departure: no boundary counts any more, and no round waits for it.

        After `close()`'s last barrier, or at once after an exception or a stop.
        """
        passed = self._gate.finish()
        if not self._running or self._left or os.getpid() != self._pid or self._world.size == 1:
            return
        self._left = True
        try:
            self._send()
            final = Publication(0, self._world.rank, passed, can_save=False)
            self._rounds.publish_final(final)
            for k in tuple(self._undecided):
                self._rounds.try_to_decide(k)
        except NoAgreement as error:
            self._lose(error)

    def stop(self) -> None:
        """End both threads, within 2 s, and the sources. Main thread; may be repeated."""
        if not self._running or os.getpid() != self._pid:
            return
        self._running = False
        self._stopping.set()
        self._wake.ring()
        if self._world.size > 1 and self._lost is None:
            with self._lock:
                k = self._awaited_round
            self._guarded(lambda: self._rounds.wake_answering(k))
        until = time.monotonic() + STOP_WITHIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        for source in self._sources:
            source.stop()
        atexit.unregister(self._leave_at_exit)
        if not any(thread.is_alive() for thread in self._threads):
            self._wake.close()

    def _mode_of(self, seconds_left: float | None) -> Mode:
        try:
            return self._mode(seconds_left)
        except Exception as error:  # noqa: BLE001 - no notice may be lost over an estimate
            self.problems.append(
                f"could not choose where to stop, taking the micro-batch: {error!r}"
            )
            return "micro-batch"

    @property
    def lost(self) -> bool:
        """Return True if the store is gone: later requests are not agreed on any more."""
        return self._lost is not None

    # Requests become rounds. Any thread.

    def _add(self, notice: Notice) -> None:
        with self._lock:
            if not self._running or self._gate.finished:
                return
            self._pending.add(notice)
            self._open_rounds()
            cannot_stop = self._lost is not None and self._pending.unmet_stop()
        if cannot_stop:
            self._fail_stop(str(self._lost))
        self._wake.ring()

    def _open_rounds(self) -> None:
        while self._lost is None and (notice := self._pending.next_notice(self._undecided)):
            self._answer(notice, notice.seconds_left)

    def _answer(
        self, notice: Notice | None, seconds_left: float | None, *, stops: bool = False
    ) -> None:
        """Add the next round to the open ones, and put this rank's answer into the outbox."""
        self._answered += 1
        k = self._answered
        passed = self._gate.open_round(k)
        can_save = not self._gate.finished and self._can_save()
        settled = min(self._undecided, default=k) - 1
        publication = Publication(
            round=k,
            rank=self._world.rank,
            passed=passed,
            can_save=can_save,
            notice=notice,
            settled=settled,
        )
        self._pending.published(k, notice)
        within_s = decide_within(self._timeout_s, seconds_left)
        now_s = time.monotonic()
        stops = stops or (notice is not None and notice.action == "stop")
        self._undecided[k] = Undecided(now_s, now_s + within_s, stops)
        if self._world.size == 1:
            self._act_on(decide([publication]))
        else:
            self._outbox.append(publication)

    def _act_on(self, decision: Decision) -> None:
        """Act on a decision, once."""
        with self._lock:
            entry = self._undecided.pop(decision.round, None)
            if entry is None:
                return
            stops = decision.stops and decision.round > self._forgotten
            self._pending.on_decision(decision, is_forgotten=decision.round <= self._forgotten)
            self._settled = max(self._settled, decision.settled)
        if stops and not self._gate.finished:
            if decision.failed:
                self._fail_stop(decision.why)  # before main learns of it: this call does not return
            else:
                self._prepare_stop(entry.now_left(decision.notice.seconds_left))
        self._gate.decided(decision)
        with self._lock:
            self._open_rounds()
        self._wake.ring()

    def _prepare_stop(self, seconds_left: float | None) -> None:
        try:
            self._on_stop(seconds_left)
        except Exception as error:  # noqa: BLE001 - main waits at its boundary for the decision
            self.problems.append(
                f"could not prepare the stop, which goes on: {type(error).__name__}: {error}"
            )

    def _fail_stop(self, why: str) -> None:
        if not self._gate.finished:
            self.problems.append(f"stop failed: {why}")
            self._on_failed_stop(why)

    def _send(self) -> None:
        """Publish the outbox. No lock of ours is held over a store call but this."""
        with self._sending:
            while self._outbox and self._lost is None:
                decision = self._rounds.publish(self._outbox.popleft())
                if decision is not None:
                    self._act_on(decision)

    # The thread on the descriptors.

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, None)
            for source in self._sources:
                if (descriptor := source.fileno()) is not None:
                    selector.register(descriptor, selectors.EVENT_READ, source)
            next_look = time.monotonic()
            while not self._stopping.is_set():
                ready = selector.select(max(0.0, next_look - time.monotonic()))
                sources = [key.data for key, _ in ready if key.data is not None]
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_INTERVAL_S
                    sources = list(self._sources)
                self._wake.drain()
                for source in sources:
                    self._poll(source)
                self._guarded(self._send)

    def _poll(self, source: NoticeSource) -> None:
        try:
            for notice in source.poll():
                self.request(notice)
        except Exception as error:  # noqa: BLE001 - one bad source must not deafen the others
            problem = f"{type(source).__name__} failed: {type(error).__name__}: {error}"
            if problem not in self.problems:
                self.problems.append(problem)

    # The thread on the store.

    def _answer_rounds(self) -> None:
        while not self._stopping.is_set() and self._lost is None:
            self._guarded(self._answer_rounds_once)

    def _answer_rounds_once(self) -> None:
        with self._lock:
            self._awaited_round = self._answered + 1
            idle, settled = not self._undecided, self._settled
        if self._stopping.is_set():
            return
        if idle:
            self._bell_rounds.forget(settled)  # all rounds before the awaited one
            self._bell_rounds.wait_for_bell(self._awaited_round, 7 * DAY_S)
            self._answer_bell()
        else:
            self._poll_undecided()

    def _answer_bell(self) -> None:
        """Answer the next round if its bell is set and this rank has not answered it."""
        with self._lock:
            k = self._answered + 1
        bell = self._rounds.bell(k)
        if bell is None or self._stopping.is_set():
            return
        with self._lock:
            if k == self._answered + 1:
                notice = self._pending.next_notice(self._undecided)
                left = bell.get("seconds_left")
                left_s = float(left) if isinstance(left, (int, float)) else None
                self._answer(notice, left_s, stops=bell.get("action") == "stop")
        self._send()

    def _poll_undecided(self) -> None:
        """Read decisions, keep deadlines, and answer further rounds, until no round is
        undecided."""
        pause_s, next_try = FIRST_PAUSE_S, time.monotonic() + RETRY_DECIDING_S
        while self._undecided and not self._stopping.is_set():
            self._answer_bell()
            retry = time.monotonic() >= next_try
            if retry:
                next_try = time.monotonic() + RETRY_DECIDING_S
            for k, entry in tuple(self._undecided.items()):
                decision = self._rounds.decision(k)
                if decision is None and time.monotonic() >= entry.give_up_s:
                    decision = self._rounds.give_up(k)
                elif decision is None and retry:
                    decision = self._rounds.try_to_decide(k)
                if decision is not None:
                    self._act_on(decision)
            self._send()
            if self._undecided:
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    # When the store is gone.

    def _guarded(self, act: Callable[[], None]) -> None:
        """Run `act`; a failure must not leave main waiting for a decision that cannot come."""
        try:
            act()
        except NoAgreement as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - as said
            self._lose(NoAgreement(f"the watcher failed: {type(error).__name__}: {error}"))

    def _lose(self, error: NoAgreement) -> None:
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or error
            # A rank without a request learns of a stop from the bell.
            stopping = any(entry.stops for entry in self._undecided.values())
            stopping = stopping or (self._pending.stop_mode is not None and bool(self._undecided))
        if not first or not self._running:
            return
        if not self._gate.finished:
            self._on_lost(str(error))
        self.problems.append(str(error))
        if stopping:
            self._fail_stop(str(error))
        self._gate.broken(error)

    def _leave_at_exit(self) -> None:
        """End the threads at exit: one that wakes in a dying interpreter crashes it."""
        self.publish_final()
        self.stop()
