"""Signs of life: whether the other ranks are there still, asked by a thread while main trains.

    each period    tells the store that this process lives; looks at the next few ranks, and whether
                   anybody has given up on anyone
    a rank is lost if it has said nothing for `after_s`, and main has got nowhere for as long: a
                   process that was only slow holds nobody up, and nobody gives up on it
    sooner         if a connection to it broke, or the store is gone, and main hangs

Who finds that tells all, and all act on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement

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
        self._seen: dict[int, tuple[object, float]] = {}
        self._stopping = threading.Event()
        self._lost = self._slow = self._deaf = ""
        self._left = False
        self._answered_s = time.monotonic()
        self._period_s = min(LONGEST_PERIOD_S, after_s / 5)

    def start(self) -> None:
        """From now on. The store may hang with the process that holds it, so two threads."""
        self._answered_s = time.monotonic()
        for run in (self._ask, self._judge):
            threading.Thread(target=run, name="trainckpt-alive", daemon=True).start()

    def stop(self, *, left: bool = False) -> None:
        """Nothing is judged any more. Waits for nobody.

        Args:
            left: In order: the others do not wait for a sign of this rank either.
        """
        self._left = left
        self._stopping.set()

    def _ask(self) -> None:
        beats = 0
        try:
            while not self._stopping.wait(self._period_s):
                beats += 1
                self._look(beats)
                self._answered_s = time.monotonic()
            if self._left:
                self._channel.put(str(self._rank), _LEFT)
        except NoAgreement as error:
            self._deaf = error.message

    def _look(self, beats: int) -> None:
        """What somebody has given up on; and who has said nothing for too long."""
        self._channel.put(str(self._rank), beats)
        told, now_s = self._channel.peek_all([str(r) for r in self._neighbours]), time.monotonic()
        slow = ""
        for rank, count in zip(self._neighbours, told, strict=True):
            before, since_s = self._seen.get(rank, (None, now_s))
            if count != before or rank not in self._seen or count == _LEFT:
                self._seen[rank] = count, now_s
            elif now_s - since_s > self._after_s:
                slow = f"rank {rank} has said nothing for {now_s - since_s:.0f} s"
        self._slow = slow
        self._lost = str(self._channel.peek(_LOST) or "")

    def _judge(self) -> None:
        progress, moved_s = self._progress(), time.monotonic()
        while not self._stopping.wait(self._period_s):
            now_s = time.monotonic()
            if self._progress() != progress:
                progress, moved_s = self._progress(), now_s
            why = self._lost or self._verdict(now_s, now_s - moved_s)
            if why and not self._stopping.is_set():
                self.tell_soon(why)
                self._on_lost(why)
                return

    def _verdict(self, now_s: float, still_s: float) -> str:
        """Why this rank gives up on another, main having got nowhere for so long; or ""."""
        if still_s > min(HANGS_S, self._after_s) and (evidence := self._deaf or self._broken()):
            return evidence
        if still_s <= self._after_s:
            return ""
        if now_s - self._answered_s > self._after_s:
            return "the store of torch.distributed does not answer"
        return self._slow

    def tell_soon(self, why: str) -> None:
        """Let all others know that a rank is gone. Waits for nobody: the store may hang."""
        threading.Thread(target=self._tell, args=(why,), daemon=True).start()

    def _tell(self, why: str) -> None:
        with contextlib.suppress(NoAgreement):
            self._channel.connection().propose(_LOST, why)
