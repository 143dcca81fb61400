"""Flushing: what one rank of an attempt has to do with slower tiers; without any, nothing.

saving thread     committed   each tier's flusher is offered the snapshot
training thread   leave       at the end: what is not copied yet is copied, as far as time allows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.deciding.flush_plan import Leaving, flush_limit_s
from trainckpt.lifecycle.run import supervisor_told
from trainckpt.lifecycle.run.options import LOCAL
from trainckpt.lifecycle.run.pending import DURABLE
from trainckpt.preemption.notice import OF_MACHINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.flushing.drain import Drain
    from trainckpt.lifecycle.flushing.flusher import Flusher
    from trainckpt.lifecycle.run.pending import PendingSave


class Flushing:
    """The flushers of one rank.

    Attributes:
        flushers: One for each slower tier, nearest first.
    """

    def __init__(self, flushers: Sequence[Flusher] = (), durable: str = LOCAL) -> None:
        self.flushers = tuple(flushers)
        self._durable = durable

    def start(self) -> None:
        """The attempt has begun."""
        for flusher in self.flushers:
            flusher.start()

    def committed(self, manifest: Manifest, pending: PendingSave, own_bytes: int) -> None:
        """A snapshot is committed in the run's place; as `Flusher.offer`."""
        if self._durable == LOCAL:
            pending.reach(DURABLE)
        for flusher in self.flushers:
            flusher.offer(manifest, pending, own_bytes)

    @property
    def busy(self) -> list[str]:
        """Full names of snapshots that are being copied."""
        return [name for flusher in self.flushers if (name := flusher.busy) is not None]

    def holding(self, snapshot: str | None) -> list[str]:
        """Names of the tiers that hold the snapshot an attempt ends with."""
        if snapshot is None:
            return []
        return [LOCAL, *(f.tier.name for f in self.flushers if f.newest == snapshot)]

    def predicted(self) -> list[tuple[str, float | None]]:
        """Of each slower tier, how long a copy of the newest snapshot will take, as measured."""
        return [(f.tier.name, f.copy_s()) for f in self.flushers]

    def limit_s(self, reason: str, left_s: float | None, *, on_this_host: bool) -> float:
        """How long `leave` may take, at a stop for this reason.

        Args:
            reason: Of the stop.
            left_s: Until the deadline.
            on_this_host: The run's place lies on this machine alone.
        """
        if not self.flushers:
            return 0.0
        leaving = Leaving(
            left_s, self.flushers[0].predicted_s(),
            supervised=supervisor_told.is_there(),
            host_goes=on_this_host and reason.startswith(OF_MACHINE),
        )  # fmt: skip
        return flush_limit_s(leaving)

    def leave(self, drain: Drain) -> None:
        """The attempt ends: copy what waits, for so long at most. Every rank; then it is over."""
        for flusher in self.flushers:
            flusher.drain(drain)

    def give_up(self) -> None:
        """The process ends: whatever is under way is left."""
        for flusher in self.flushers:
            flusher.stop()
