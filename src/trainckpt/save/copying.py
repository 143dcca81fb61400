"""Copy the tensors of a save into its arena, at the boundary or overlapped with training.

Overlap hides the copy behind forward and backward if another core, or a device that computes, is
left to run it. Otherwise training only becomes slower somewhere else. So `choose` compares the time
from one step to the next: with a save of either kind in it, and without any.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.state.overlapped_copy import OverlappedCopy, StepFence
from trainckpt.state.staging import TensorsChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.state.device_copy import DeviceCopier
    from trainckpt.state.registry import Registry
    from trainckpt.state.staging import Shard


PLAIN, OVERLAP = "plain", "overlap"
NONE = ""  # no save in it
ENOUGH = 2  # saves of a kind before it is judged
RETRY_EVERY = 64  # saves after which the other kind is tried once more; the first time sooner
FIRST_RETRY = 16
REMEMBERED = 16


def choose(periods_s: Mapping[str, Sequence[float]], number: int) -> str:
    """Return the kind of the save of this number, from 1. Pure.

    Args:
        periods_s: Kind -> seconds from step to step of the last periods of that kind.
        number: Number of the save in this attempt. The first makes the arena, and measures nothing.
    """
    plain, overlap = periods_s[PLAIN], periods_s[OVERLAP]
    if number == 1:
        return PLAIN
    if min(len(plain), len(overlap)) < ENOUGH:
        return OVERLAP if len(overlap) <= len(plain) else PLAIN
    better, other = (
        (OVERLAP, PLAIN)
        if statistics.median(overlap) <= statistics.median(plain)
        else (PLAIN, OVERLAP)
    )
    retries_other = number == FIRST_RETRY or number % RETRY_EVERY == 0
    return other if retries_other else better


class CopyChoice:
    """Measures, and chooses the kind of the next save. Training thread."""

    def __init__(self) -> None:
        self._periods_s: dict[str, deque[float]] = {
            kind: deque(maxlen=REMEMBERED) for kind in (NONE, PLAIN, OVERLAP)
        }
        self._last_s: float | None = None
        self._kind: str | None = None  # of the period that runs; None: it measures nothing
        self._saves = 0

    def on_step(self, now_s: float) -> None:
        """Note that a step of the first optimizer begins."""
        if self._last_s is not None and self._kind is not None:
            self._periods_s[self._kind].append(now_s - self._last_s)
        self._last_s, self._kind = now_s, NONE

    def exclude_period(self) -> None:
        """Exclude the current period from the measurement."""
        self._kind = None

    def next(self) -> str:
        """Return the kind of the save that is taken now."""
        self._saves += 1
        kind = choose(self._periods_s, self._saves)
        is_first = self._saves == 1 or self._kind != NONE
        self._kind = None if is_first else kind
        return kind


PREPARED_AT = 2  # the second step: the first has made the optimizer's state
PROVED_FIRST, PROVED_EVERY = 2, 8  # overlapped saves whose copies are compared with live tensors


class StateCopier:
    """Copies the saves of one attempt into memory, on one rank."""

    def __init__(
        self,
        registry: Registry,
        *,
        prepare: Callable[[], None],
        before_step: Callable[[], None],
        on_wait: Callable[[float], object],
        num_threads: int,
        device_copier: DeviceCopier,
    ) -> None:
        """Hook the optimizers' steps.

        Args:
            registry: The tracked state.
            prepare: Called once, before the second step, when all state exists.
            before_step: Called before each step of the first optimizer; returns when the step may
                go on.
            on_wait: Called after a step has waited for copies, with the moment from which on.
            num_threads: Number of threads that copy.
            device_copier: Copies from a GPU by itself.
        """
        self._first = registry.optimizers[0].optimizer if registry.optimizers else None
        self._choice = CopyChoice()
        self._num_threads = num_threads
        self._device_copier = device_copier
        self._fence = StepFence(self._on_step, self._device_copier, on_wait)
        self._overlapped: OverlappedCopy | None = None
        self._number = 0
        self._prepare, self._before_step = prepare, before_step
        self._steps = 0
        self._excluded: set[str] = set()  # tensors that something else was seen to change

    def stage_arguments(self, only_stepped: set[str]) -> dict[str, Any]:
        """Return arguments for `state.staging.stage`: the tensors that the next save copies beside
        training.

        If there are none, digests are computed at once: where overlap gained nothing, no core is
        free to digest beside training either.
        """
        if not only_stepped:
            return {}
        if self._choice.next() == OVERLAP:
            return {"later": only_stepped - self._excluded}
        return {"digests": True}

    def begin(self, shard: Shard) -> None:
        """Start the overlapped part of a staged save; no step may change it before it is copied."""
        self._overlapped = None
        if shard.rest:
            self._number += 1
            proves = self._number <= PROVED_FIRST or self._number % PROVED_EVERY == 0
            if proves:
                self._choice.exclude_period()  # the proof costs what other saves do not
            self._overlapped = OverlappedCopy(
                shard.rest,
                proves=proves,
                num_threads=self._num_threads,
                device_copier=self._device_copier,
            )
            self._fence.guard(self._overlapped)

    def finish(self) -> Iterator[int]:
        """Copy the rest. Saving thread. Yield addresses below which everything is copied.

        Raises:
            TensorsChanged: at the end, if a tensor changed while it was copied.
        """
        overlapped, self._overlapped = self._overlapped, None
        if overlapped is None:
            return
        yield from overlapped.run()
        if changed := overlapped.changed:
            self._excluded.update(changed)
            logger.debug(
                "will copy these tensors while training waits: %s", ", ".join(changed)[:500]
            )
            raise TensorsChanged(f"{', '.join(changed[:3])} changed between two optimizer steps")

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the copies of the save in flight. Training thread: nothing changes meanwhile."""
        self._fence.settle(limit_s)

    def close(self) -> None:
        """Release the hooks at the end of the attempt."""
        self._fence.close()

    def _on_step(self, optimizer: Any) -> None:
        if optimizer is self._first:
            self._before_step()
            self._steps += 1
            if self._steps == PREPARED_AT:
                self._prepare()
            self._choice.on_step(time.perf_counter())
