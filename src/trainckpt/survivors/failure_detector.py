"""Failure detector: a thread checks that the other ranks are alive while the main thread trains.

    each period    writes this rank's heartbeat to the store; reads those of the next few ranks, and
                   any report of a lost rank
    a rank is lost after `after_s` without a heartbeat, if the main thread made no progress for as
                   long: a process that is only slow delays no rank, and is not given up
    sooner         if a connection to it broke, or the store is gone, and the main thread hangs

The rank that detects a loss reports it, and all ranks act on it. Time counts only while this
process runs itself: on a suspended or overloaded machine all are silent together, and none is dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.ranks import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.ranks.store import RankStore

_LOST, _LEFT = "lost", -1
NEIGHBOURS = 4
HANGS_S = 3.0  # no progress of the main thread for so long, and there is other evidence
LONGEST_PERIOD_S = 1.0


class FailureDetector:
    """Failure detector of one rank. Sequence of calls: `start`, then `stop`."""

    def __init__(
        self,
        channel: RankStore,
        after_s: float,
        progress: Callable[[], int],
        broken: Callable[[], str],
        on_lost: Callable[[str], object],
    ) -> None:
        """Open a connection of its own to the store.

        Args:
            channel: Between the ranks.
            after_s: Seconds a rank may be silent.
            progress: Returns a count that grows with the main thread's progress.
            broken: Returns why a rank seems to be gone, or "".
            on_lost: Called once, from the thread.
        """
        self._channel = channel.scoped("alive").connection()
        self._after_s, self._progress, self._broken = after_s, progress, broken
        self._on_lost = on_lost
        rank, size = channel.world.rank, channel.world.size
        self._rank = rank
        self._neighbours = [(rank + n) % size for n in range(1, min(NEIGHBOURS, size - 1) + 1)]
        self._stopping = threading.Event()
        self._reported_loss = self._silent_rank = self._store_failure = ""
        self._left = False
        self._unanswered_s = 0.0
        self._period_s = min(LONGEST_PERIOD_S, after_s / 5)

    def start(self) -> None:
        """Start two threads: the store may hang with the process that holds it."""
        for run in (self._beat, self._judge):
            threads.thread(run, "trainckpt-alive").start()

    def stop(self, *, left: bool = False) -> None:
        """Stop judging. Does not block.

        Args:
            left: In order: the others expect no heartbeat of this rank either.
        """
        self._left = left
        self._stopping.set()

    def _beat(self) -> None:
        beats, awake = 0, RunningTime(self._period_s)
        keys, seen = [str(rank) for rank in self._neighbours], dict[int, tuple[object, float]]()
        try:
            while not self._stopping.wait(self._period_s):
                beats, passed_s, slow = beats + 1, awake.passed_s(), ""
                self._channel.put(str(self._rank), beats)
                for rank, count in zip(self._neighbours, self._channel.peek_all(keys), strict=True):
                    before, silent_s = seen.get(rank, (None, 0.0))
                    is_silent = rank in seen and count == before and count != _LEFT
                    silent_s = silent_s + passed_s if is_silent else 0.0
                    seen[rank] = count, silent_s
                    if silent_s > self._after_s:
                        slow = f"rank {rank} has been silent for {silent_s:.0f} s"
                self._silent_rank = slow
                self._reported_loss = str(self._channel.peek(_LOST) or "")
                self._unanswered_s = 0.0
            if self._left:
                self._channel.put(str(self._rank), _LEFT)
        except NoAgreement as error:
            self._store_failure = error.message

    def _judge(self) -> None:
        progress, still_s, awake = self._progress(), 0.0, RunningTime(self._period_s)
        while not self._stopping.wait(self._period_s):
            passed_s = awake.passed_s()
            self._unanswered_s += passed_s
            still_s += passed_s
            if self._progress() != progress:
                progress, still_s = self._progress(), 0.0
            reason = self._reported_loss or self._verdict(still_s)
            if reason and not self._stopping.is_set():
                self.report_lost(reason)
                self._on_lost(reason)
                return

    def _verdict(self, still_s: float) -> str:
        if still_s > min(HANGS_S, self._after_s):
            evidence = self._store_failure or self._broken()
            if evidence:
                return evidence
        if still_s <= self._after_s:
            return ""
        if self._unanswered_s > self._after_s:
            return "the store of torch.distributed does not answer"
        return self._silent_rank

    def report_lost(self, why: str) -> None:
        """Report a lost rank to all others. Does not block: the store may hang."""

        def report() -> None:
            with contextlib.suppress(NoAgreement):
                self._channel.connection().propose(_LOST, why)

        threads.thread(report, "trainckpt-lost").start()


class RunningTime:
    """Seconds between checks that this process was running: at most two periods each."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = 2 * period_s, clock
        self._last_s = clock()

    def passed_s(self) -> float:
        """Return the seconds since the last call."""
        before_s, self._last_s = self._last_s, self._clock()
        return min(self._last_s - before_s, self._most_s)
