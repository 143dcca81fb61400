"""Orders: what ranks tell each other of the copies to one tier, and when that is forgotten.

    <n>/order       rank 0 to all: which snapshot, or why none of it can be copied; the last one
                    says that it is over
    <n>/report/<r>  rank r to rank 0: how its share went
    <n>/verdict     rank 0 to all
    signs, ending   counters, all to rank 0: blocks go on; so many ranks make a file durable
    left            rank 0 to all, at the end: it is over
    hurry           any rank to rank 0, at the end: it was asked to leave

The store keeps a key until it is deleted, and a run copies for weeks. Who has reported has read the
order, and the verdict before it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, UnusableSnapshot
from trainckpt.lifecycle.flushing.drain import LOOK_S
from trainckpt.ranks.channel import DAY_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.lifecycle.flushing.drain import Drain
    from trainckpt.ranks.channel import Channel

SIGN_S = 30.0
HANGS_AFTER_S, ENDS_WITHIN_S = 300.0, 3600.0  # without a sign; of a file that is made durable
_SIGNS, _ENDING, _HURRY = "signs", "ending", "hurry"


def failure(error: Exception, rank: int) -> dict[str, Any]:
    """A report or verdict; `lost`: there is nothing left to try again with."""
    message = getattr(error, "message", None) or str(error) or repr(error)
    return {"error": f"rank {rank}: {message}", "lost": isinstance(error, UnusableSnapshot)}


def await_end(channel: Channel, drain: Drain) -> None:
    """Any other rank, at the end: until rank 0 says that it is over. It hears of who asks here."""
    told = False
    while not channel.wait("left", min(drain.left_s(), LOOK_S)) and drain.left_s() > 0:
        if not told and (asked := drain.asked()) is not None:
            told = True
            channel.put(_HURRY, list(asked))


class Orders:
    """Of one rank and tier. One thread."""

    def __init__(self, channel: Channel) -> None:
        """`channel`: a connection of its own, keys of this tier."""
        self._channel = channel
        self._rank, self._size = channel.world.rank, channel.world.size
        self._number = 0
        self._signed_s, self._is_ending = 0.0, False

    def give(self, order: dict[str, Any]) -> None:
        """Rank 0: what all are to copy now."""
        self._number += 1
        self._channel.put(f"{self._number}/order", order)

    def reports(self) -> list[dict[str, Any]]:
        """Rank 0: of all others, in their order."""
        number, others = self._number, range(1, self._size)
        found = [self._channel.get(f"{number}/report/{rank}", DAY_S) for rank in others]
        self._forget(f"{number}/order", f"{number - 1}/verdict")
        return found

    def tell(self, verdict: dict[str, Any]) -> None:
        """Rank 0: how it went."""
        self._channel.put(f"{self._number}/verdict", verdict)

    def end(self) -> None:
        """Rank 0: no order comes any more."""
        self._channel.put(f"{self._number + 1}/order", {"over": True})

    def wait(self) -> dict[str, Any] | None:
        """Any other rank: the next order; None: it is over."""
        key = f"{self._number + 1}/order"
        while not self._channel.wait(key, DAY_S):
            pass  # idle, and no gather: a run may copy less often than once a day
        order: dict[str, Any] = self._channel.peek(key)
        if "over" in order:
            return None
        self._number += 1
        return order

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: how its share went; the verdict."""
        key = f"{self._number}/report/{self._rank}"
        self._channel.put(key, report)
        verdict: dict[str, Any] = self._channel.get(f"{self._number}/verdict", DAY_S)
        self._forget(key)
        return verdict

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Around the copy of one file."""
        try:
            yield
        finally:
            if self._is_ending:
                self._is_ending = False
                self._count(_ENDING, -1)

    def sign(self, num_bytes: int) -> None:
        """So much of the file is to come; 0: what came is made durable, which may take long."""
        now_s = time.monotonic()
        if num_bytes == 0:
            self._is_ending = True
            self._count(_ENDING, 1)
        elif now_s - self._signed_s > SIGN_S:
            self._signed_s = now_s
            self._count(_SIGNS, 1)

    def _count(self, key: str, by: int) -> None:
        with contextlib.suppress(NoAgreement):  # nobody is left who would hear of it
            self._channel.count(key, by)

    def _forget(self, *keys: str) -> None:
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to forget
            self._channel.forget(keys)


class Signs:
    """Rank 0, beside the thread that copies: whether any rank still gets on with it."""

    def __init__(self, channel: Channel) -> None:
        """`channel`: the keys of this tier; nobody waits on it."""
        self._channel = channel
        self._heard = 0, 0
        self._since_s: float | None = None

    def hurry(self) -> list[Any] | None:
        """What another rank was told that it is to leave for; None: nothing."""
        with contextlib.suppress(NoAgreement):
            told: list[Any] | None = self._channel.peek(_HURRY)
            return told
        return None

    def stop_at(self, now_s: float) -> bool:
        """Whether it hangs: there was no sign for too long. Asked again and again."""
        heard = self._heard
        with contextlib.suppress(NoAgreement):
            heard = self._channel.count(_SIGNS, 0), self._channel.count(_ENDING, 0)
        if self._since_s is None or heard != self._heard:
            self._heard, self._since_s = heard, now_s
        return now_s - self._since_s > (ENDS_WITHIN_S if heard[1] > 0 else HANGS_AFTER_S)
