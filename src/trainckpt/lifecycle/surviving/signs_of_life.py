"""Signs of life: whether the other ranks are there still, asked by a thread while main trains.

    each period    tells the store that this process lives; looks at the next few ranks, and whether
                   anybody has given up on anyone
    a rank is lost if it has said nothing for `after_s`, and main has got nowhere for as long: a
                   process that was only slow holds nobody up, and nobody gives up on it
    sooner         if a connection to it broke, or the store is gone, and main hangs

Who finds that tells all, and all act on it. Time counts only while this process runs itself: on a
machine that was suspended, or is overloaded, all are silent together and nobody is dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.ranks import talking

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.ranks.channel import Channel

_LOST, _LEFT = "lost", -1
NEIGHBOURS = 4
HANGS_S = 3.0  # main has got nowhere for so long, and there is other evidence
LONGEST_PERIOD_S = 1.0


class SignsOfLife:
    """Of one rank: sequence of calls: `start`, then `stop`."""

    def __init__(
        self,
        channel: Channel,
        after_s: float,
        progress: Callable[[], int],
        broken: Callable[[], str],
        on_lost: Callable[[str], object],
    ) -> None:
        """Of one rank.

        Args:
            channel: Between the ranks.
            after_s: How long a rank may say nothing.
            progress: Counts whatever main gets done.
            broken: Why a rank seems to be gone, or "".
            on_lost: Called once, from the thread.
        """
        self._channel = channel.scoped("alive").connection()
        self._after_s, self._progress, self._broken = after_s, progress, broken
        self._on_lost = on_lost
        rank, size = channel.world.rank, channel.world.size
        self._rank = rank
        self._neighbours = [(rank + n) % size for n in range(1, min(NEIGHBOURS, size - 1) + 1)]
        self._seen: dict[
            int, tuple[object, float]
        ] = {}  # what a rank said last; silent for so long
        self._stopping = threading.Event()
        self._lost = self._slow = self._deaf = ""
        self._left = False
        self._unanswered_s = 0.0
        self._period_s = min(LONGEST_PERIOD_S, after_s / 5)

    def start(self) -> None:
        """From now on. The store may hang with the process that holds it, so two threads."""
        for run in (self._ask, self._judge):
            talking.thread(run, "trainckpt-alive").start()

    def stop(self, *, left: bool = False) -> None:
        """Nothing is judged any more. Waits for nobody.

        Args:
            left: In order: the others do not wait for a sign of this rank either.
        """
        self._left = left
        self._stopping.set()

    def _ask(self) -> None:
        beats, awake = 0, Awake(self._period_s)
        try:
            while not self._stopping.wait(self._period_s):
                beats += 1
                self._look(beats, awake.passed_s())
                self._unanswered_s = 0.0
            if self._left:
                self._channel.put(str(self._rank), _LEFT)
        except NoAgreement as error:
            self._deaf = error.message

    def _look(self, beats: int, passed_s: float) -> None:
        """What somebody has given up on; and who has said nothing for too long."""
        self._channel.put(str(self._rank), beats)
        told, slow = self._channel.peek_all([str(r) for r in self._neighbours]), ""
        for rank, count in zip(self._neighbours, told, strict=True):
            before, silent_s = self._seen.get(rank, (None, 0.0))
            is_silent = rank in self._seen and count == before and count != _LEFT
            silent_s = silent_s + passed_s if is_silent else 0.0
            self._seen[rank] = count, silent_s
            if silent_s > self._after_s:
                slow = f"rank {rank} has said nothing for {silent_s:.0f} s"
        self._slow = slow
        self._lost = str(self._channel.peek(_LOST) or "")

    def _judge(self) -> None:
        progress, still_s, awake = self._progress(), 0.0, Awake(self._period_s)
        while not self._stopping.wait(self._period_s):
            passed_s = awake.passed_s()
            self._unanswered_s += passed_s
            still_s += passed_s
            if self._progress() != progress:
                progress, still_s = self._progress(), 0.0
            why = self._lost or self._verdict(still_s)
            if why and not self._stopping.is_set():
                self.tell_soon(why)
                self._on_lost(why)
                return

    def _verdict(self, still_s: float) -> str:
        """Why this rank gives up on another, main having got nowhere for so long; or ""."""
        if still_s > min(HANGS_S, self._after_s) and (evidence := self._deaf or self._broken()):
            return evidence
        if still_s <= self._after_s:
            return ""
        if self._unanswered_s > self._after_s:
            return "the store of torch.distributed does not answer"
        return self._slow

    def tell_soon(self, why: str) -> None:
        """Let all others know that a rank is gone. Waits for nobody: the store may hang."""
        talking.thread(self._tell, "trainckpt-lost", why).start()

    def _tell(self, why: str) -> None:
        with contextlib.suppress(NoAgreement):
            self._channel.connection().propose(_LOST, why)


class Awake:
    """Seconds between looks that this process was there for: no more than two periods each."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = 2 * period_s, clock
        self._last_s = clock()

    def passed_s(self) -> float:
        """Since the last call."""
        before_s, self._last_s = self._last_s, self._clock()
        return min(self._last_s - before_s, self._most_s)
