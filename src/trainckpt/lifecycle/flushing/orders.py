"""Orders: what ranks tell each other of the copies to one tier, and when that is forgotten.

    <n>/order       rank 0 to all: which snapshot, or why none of it can be copied; the last one
                    says that it is over
    <n>/report/<r>  rank r to rank 0: how its share went
    <n>/verdict     rank 0 to all

The store keeps a key until it is deleted, and a run copies for weeks. Who has reported has read the
order, and the verdict before it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, UnusableSnapshot
from trainckpt.ranks.channel import DAY_S

if TYPE_CHECKING:
    from trainckpt.ranks.channel import Channel


def failure(error: Exception, rank: int) -> dict[str, Any]:
    """A report or verdict; `lost`: there is nothing left to try again with."""
    message = getattr(error, "message", None) or str(error) or repr(error)
    return {"error": f"rank {rank}: {message}", "lost": isinstance(error, UnusableSnapshot)}


class Orders:
    """Of one rank and tier. One thread."""

    def __init__(self, channel: Channel) -> None:
        """`channel`: a connection of its own, keys of this tier."""
        self._channel = channel
        self._rank, self._size = channel.world.rank, channel.world.size
        self._number = 0

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
        order: dict[str, Any] = self._channel.get(f"{self._number + 1}/order", DAY_S)
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

    def _forget(self, *keys: str) -> None:
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to forget
            self._channel.forget(keys)
