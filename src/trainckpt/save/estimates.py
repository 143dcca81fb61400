"""Measure micro-batches and saves; estimate how long a save takes, and its bytes.

`Timings.on_boundary` is called at every boundary, so it makes no object and calls no clock of its
own. The training thread writes; any thread reads.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.attempt.duration_histogram import DurationHistogram
from trainckpt.attempt.time_keeper import BOUNDARY_S, TimeKeeper
from trainckpt.encryption.encrypted_file import bytes_per_s
from trainckpt.state.adapters import fsdp
from trainckpt.state.dtensor import is_sharded, local

if TYPE_CHECKING:
    from trainckpt.attempt.options import Options
    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.format.cursor import Cursor
    from trainckpt.state.registry import Registry


REMEMBERED = 16


class SaveDurations:
    """Every save of this rank, for metrics. The parts of a committed save follow each other.

    Attributes:
        stall: Training waited for the save to be staged. Training thread.
        stage: Until the state was in memory; none where it is written from where it lies.
        persist: Until this rank's file was on stable storage.
        commit: Until all ranks had theirs there, and the snapshot was committed.
    """

    def __init__(self) -> None:
        self.stall, self.stage = DurationHistogram(), DurationHistogram()
        self.persist, self.commit = DurationHistogram(), DurationHistogram()


class Timings:
    """Durations of one attempt on this rank.

    Attributes:
        times: The attempt's time as a whole.
        durations: Of its saves.
    """

    def __init__(self, times: TimeKeeper | None = None) -> None:
        self.times = times or TimeKeeper(0.0)
        self.durations = SaveDurations()
        self._durations_s: deque[float] = deque(maxlen=REMEMBERED)
        self._saves: deque[float] = deque(maxlen=3)
        self._save_s: float | None = None
        self._stalls: deque[float] = deque(maxlen=5)
        self._copies: deque[float] = deque(maxlen=3)
        self._last_s: float | None = None

    def on_boundary(self, now_s: float) -> None:
        """Record the time of a boundary."""
        if self._last_s is not None:
            self._durations_s.append(now_s - self._last_s)
        self._last_s = self.times.numbers[BOUNDARY_S] = now_s

    def after_save(self, cursor: Cursor, now_s: float) -> None:
        """Record the time after a save at a boundary, and the wait of training for it."""
        begun_s = now_s if self._last_s is None else self._last_s
        self.times.note_staged(cursor, begun_s)
        self.times.add_wait(begun_s, now_s)
        self.after_boundary(now_s)

    def after_boundary(self, now_s: float) -> None:
        """Record the time after a boundary: work done there is no part of a micro-batch."""
        self._last_s = now_s

    def record_wait(self, begun_s: float) -> None:
        """Record a wait of a step for a save; it has ended now."""
        self.times.add_wait(begun_s, time.monotonic(), saves=0)

    def on_commit(self, event: CommitEvent) -> None:
        """Record a committed save of this rank. Saving thread."""
        self.record_save(event.num_bytes, event.seconds)
        self.times.note_commit(event.manifest.cursor)
        stage_s, persist_s, commit_s = event.stages
        if stage_s is not None:
            self.durations.stage.observe(stage_s)
        self.durations.persist.observe(persist_s)
        self.durations.commit.observe(commit_s)

    def record_save(self, num_bytes: int, seconds: float) -> None:
        """Record the size and duration of a save."""
        self._save_s = seconds
        if num_bytes > 0:
            self._saves.append(seconds / num_bytes)

    def record_stall(self, seconds: float) -> None:
        """Record the seconds that training waited for a save to be staged."""
        self._stalls.append(seconds)
        self.durations.stall.observe(seconds)

    def record_copy(self, num_bytes: int, seconds: float) -> None:
        """Record the seconds from a save's beginning until it was in memory. Saving thread."""
        if num_bytes > 0:
            self._copies.append(seconds / num_bytes)

    def since_s(self, now_s: float) -> float | None:
        """Return the seconds since the last boundary was reached or left; None before the first."""
        return None if self._last_s is None else max(now_s - self._last_s, 0.0)

    @property
    def stall_s(self) -> float | None:
        """Median stall of the last saves, in seconds; None before the first."""
        return statistics.median(tuple(self._stalls)) if self._stalls else None

    @property
    def save_s(self) -> float | None:
        """Seconds of the last save until its commit; None before the first."""
        return self._save_s

    @property
    def micro_batch_s(self) -> float | None:
        """Median of the last micro-batches; None before the second boundary."""
        return statistics.median(tuple(self._durations_s)) if self._durations_s else None

    @property
    def seconds_per_byte(self) -> float | None:
        """Slowest of the last saves; None before the first."""
        return max(tuple(self._saves), default=None)

    @property
    def least_seconds_per_byte(self) -> float | None:
        """Fastest of the last saves; None before the first."""
        return min(tuple(self._saves), default=None)

    @property
    def copy_seconds_per_byte(self) -> float | None:
        """Slowest of the last saves, until all was in memory; None before the first."""
        return max(tuple(self._copies), default=None)


# ---- the time of a save


FRESH_MEMORY = 5  # times as slow as memory that was used before


class SaveEstimator:
    """Predicts how long a save would take now. Any thread; never blocks."""

    def __init__(self, options: Options, registry: Registry, timings: Timings) -> None:
        self._options = options
        self._registry = registry
        self._timings = timings

    def save_s(self) -> float:
        """Return the shortest time a save would take now; 0 where nothing was measured.

        At a boundary, on the training thread: it reads the gradients. The shortest, since the
        estimate decides whether to try at all: a slower save is abandoned at the deadline, and
        costs nothing.
        """
        now_bytes = weigh(self._registry, gradients=True).now
        return now_bytes * (self._timings.least_seconds_per_byte or 0.0)

    def memory_s(self) -> float | None:
        """Return the seconds of a save to shared memory now; None: nothing was measured.

        With encryption, memory holds a save twice, and the encryption speed is measured here: some
        milliseconds, on the training thread, once an attempt ends.
        """
        per_byte = self._timings.copy_seconds_per_byte
        if per_byte is None:
            return None
        if self._options.encrypt_to:  # one thread, and memory that is as slow as fresh memory
            per_byte += 1 / bytes_per_s() + FRESH_MEMORY * per_byte
        return per_byte * weigh(self._registry, gradients=True).now


# ---- bytes of a snapshot of the registered objects: reads sizes, copies nothing


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the whole state; or of one rank's part, as far as tensors are sharded.

    Attributes:
        state: At a window's end.
        gradients: Present now; 0 if not read.
        possible_gradients: If every parameter with `requires_grad` had one.
    """

    state: int
    gradients: int
    possible_gradients: int

    @property
    def now(self) -> int:
        """Return the bytes of a snapshot taken now."""
        return self.state + self.gradients


def weigh(registry: Registry, *, gradients: bool, own_part: bool = False) -> StateBytes:
    """Return an estimate: training may add optimizer state later.

    Args:
        registry: The tracked objects.
        gradients: Count the present ones. Only for the training thread, at a boundary: to read
            `.grad` while another thread is in a backward corrupts torch's memory.
        own_part: Count this rank's part of a sharded tensor, not the whole one.
    """
    num_bytes = _own_bytes if own_part else _bytes
    state = there = possible = 0
    for model in registry.models:
        state += sum(num_bytes(buffer) for buffer in model.module.buffers())
        now, unsharded = fsdp.gradient_bytes(model.wrapped)
        there, possible = there + now, possible + unsharded
    for parameter in registry.trained_parameters().values():
        state += num_bytes(parameter)
        if gradients and parameter.grad is not None:
            there += num_bytes(parameter.grad)
        possible += num_bytes(parameter) if parameter.requires_grad else 0
    for engine in registry.engines:
        there += sum(map(num_bytes, engine.window_tensors())) if gradients else 0
        possible += engine.buffer_bytes
    for optimizer in registry.optimizers:
        if optimizer.is_partitioned:
            state += sum(map(num_bytes, optimizer.parameters()))
        for items in list(optimizer.optimizer.state.values()):
            if isinstance(items, dict):
                values = list(items.values())
                state += sum(num_bytes(v) for v in values if isinstance(v, torch.Tensor))
    return StateBytes(state, there, possible)


def _own_bytes(tensor: torch.Tensor) -> int:
    """Return the size of this rank's part."""
    return _bytes(local(tensor) if is_sharded(tensor) else tensor)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the size, also of a sparse tensor; 0 if unknown."""
    try:
        if tensor.layout is torch.sparse_coo:
            return tensor._indices().nbytes + tensor._values().nbytes
        return tensor.nbytes
    except RuntimeError:
        return 0


def shard_bytes(registry: Registry, world: int, *, gradients: bool = False) -> int:
    """Estimate the bytes of one rank's shard file at a window's end, or with all `gradients`.

    A rank stores its part of sharded tensors. Under DDP the ranks divide the state equal on all;
    the gradients of an open window mostly differ.
    """
    weight = weigh(registry, gradients=False, own_part=True)
    own = weight.possible_gradients if gradients else 0
    return weight.state // (world if _is_replicated(registry) else 1) + own


def gradient_bytes(registry: Registry, world: int) -> int:
    """Estimate the bytes that the gradients of an open window add to a snapshot, on all ranks."""
    of_model = weigh(registry, gradients=False).possible_gradients
    return of_model * (world if _is_replicated(registry) else 1)


def _is_replicated(registry: Registry) -> bool:
    """Return True under DDP."""
    return any(isinstance(m.reducing, DistributedDataParallel) for m in registry.models)
