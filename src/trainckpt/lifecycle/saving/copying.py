"""Copying: how the tensors of a save get into its arena, while training waits or beside it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.deciding.copy_choice import OVERLAP, CopyChoice
from trainckpt.lifecycle.run.log import logger
from trainckpt.state.overlap import Fence, Overlapped
from trainckpt.state.side import Side
from trainckpt.state.stage import TensorsChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.state.registry import Registry
    from trainckpt.state.stage import Shard

PREPARED_AT = 2  # the second step: the first has made the optimizer's state
PROVED_FIRST, PROVED_EVERY = 2, 8  # overlapped saves whose copies are compared with live tensors


class Copying:
    """Of one attempt."""

    def __init__(
        self,
        registry: Registry,
        prepare: Callable[[], None] = lambda: None,
        *,
        num_threads: int = 1,
        hold: Callable[[], None] = lambda: None,
        side: Side | None = None,
    ) -> None:
        """Of one rank.

        Args:
            registry: What is saved.
            prepare: Called once, when all state is there: before the second step.
            num_threads: That copy.
            hold: Called before each step of the first optimizer: returns when it may be taken.
            side: What copies from a GPU by itself.
        """
        self._first = registry.optimizers[0].optimizer if registry.optimizers else None
        self._choice = CopyChoice()
        self._num_threads = num_threads
        self._side = side or Side()
        self._fence = Fence(self._stepping, self._side)
        self._overlapped: Overlapped | None = None
        self._number = 0
        self._prepare, self._hold = prepare, hold
        self._steps = 0
        self._never: set[str] = set()  # tensors that something else was seen to change

    def how(self, only_stepped: set[str]) -> dict[str, Any]:
        """As `stage.stage` takes it: which of these tensors the next save copies beside training.

        If none: where copying beside training was no gain, no core is free to digest either.
        """
        if not only_stepped:
            return {}
        if self._choice.next() == OVERLAP:
            return {"later": only_stepped - self._never}
        return {"digests": True}

    def begin(self, shard: Shard) -> None:
        """The save is staged but for its rest, which no step may change before it is copied."""
        self._overlapped = None
        if shard.rest:
            self._number += 1
            proves = self._number <= PROVED_FIRST or self._number % PROVED_EVERY == 0
            if proves:
                self._choice.disregard()  # the proof costs what other saves do not
            turn = None if self._number <= PROVED_FIRST else self._number // PROVED_EVERY
            self._overlapped = Overlapped(
                shard.rest, proves=proves, turn=turn, num_threads=self._num_threads,
                side=self._side,
            )  # fmt: skip
            self._fence.guard(self._overlapped)

    def finish(self, is_urgent: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Copy the rest. Saving thread. Gives addresses below which everything is copied.

        Args:
            is_urgent: Whether training waits for the save somewhere; asked now and then.

        Raises:
            TensorsChanged: in the end: the copy is of no one instant.
        """
        overlapped, self._overlapped = self._overlapped, None
        if overlapped is None:
            return
        yield from overlapped.run(is_urgent)
        if changed := overlapped.changed:
            self._never.update(changed)
            logger.info("from now on copied while training waits: %s", ", ".join(changed)[:500])
            raise TensorsChanged(f"{', '.join(changed[:3])} changed between two optimizer steps")

    def settle(self, limit_s: float | None = None) -> None:
        """The training thread waits, so nothing changes: let the save in flight be finished."""
        self._fence.settle(limit_s)

    def close(self) -> None:
        """The attempt is over."""
        self._fence.close()

    def _stepping(self, optimizer: Any) -> None:
        if optimizer is self._first:
            self._hold()
            self._steps += 1
            if self._steps == PREPARED_AT:
                self._prepare()
            self._choice.reach(time.perf_counter())
