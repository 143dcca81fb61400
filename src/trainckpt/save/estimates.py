"""Measure micro-batches and saves; estimate a save and its bytes; decide where a stop may fall.

`Timings.on_boundary` is called at every boundary, so it makes no object and calls no clock of its
own. The training thread writes; any thread reads.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.attempt.log import logger
from trainckpt.encryption.encrypted_file import bytes_per_s
from trainckpt.replicate.uploads import CAUTION
from trainckpt.state.adapters import fsdp
from trainckpt.storage.host_resources import budget_bytes

if TYPE_CHECKING:
    from trainckpt.attempt.options import Options
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.attempt.save_handle import Committed
    from trainckpt.notice import Mode
    from trainckpt.state.registry import Registry


REMEMBERED = 16


class Timings:
    """Durations of one attempt on this rank."""

    def __init__(self) -> None:
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
        self._last_s = now_s

    def after_boundary(self, now_s: float) -> None:
        """Record the time after a boundary: work done there is no part of a micro-batch."""
        self._last_s = now_s

    def on_commit(self, event: Committed) -> None:
        """Record a committed save of this rank. Saving thread."""
        self.record_save(event.num_bytes, event.seconds)

    def record_save(self, num_bytes: int, seconds: float) -> None:
        """Record the size and duration of a save."""
        self._save_s = seconds
        if num_bytes > 0:
            self._saves.append(seconds / num_bytes)

    def record_stall(self, seconds: float) -> None:
        """Record the seconds that training waited for a save to be staged."""
        self._stalls.append(seconds)

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


# ---- where a stop may fall
#
# Pure functions of measured facts. Durations are seconds, sizes bytes of the whole state. An
# unmeasured value is None; then the guarantee is chosen: the micro-batch.


UNMEASURED_SHARE = 0.5  # share of the time left reserved for a save without measurements
READ_AND_WRITE = 2.0  # gradients that are saved are read again


@dataclass(frozen=True)
class StopFacts:
    """Facts known when a notice comes.

    Attributes:
        stop_at: The option.
        micro: Micro-batches trained since the last step.
        window: Micro-batches of a whole window.
        micro_batch_s: Seconds that one takes.
        state_bytes: Size of a snapshot at a window's end.
        gradient_bytes: Bytes that the open window's gradients add.
        seconds_per_byte: Of a whole save, from the call to the commit.
        memory_budget: Bytes that saves may take.
    """

    stop_at: str
    micro: int = 0
    window: int | None = None
    micro_batch_s: float | None = None
    state_bytes: int = 0
    gradient_bytes: int = 0
    seconds_per_byte: float | None = None
    memory_budget: int | None = None


def choose_mode(facts: StopFacts, seconds_left: float | None) -> tuple[Mode, str]:
    """Return the mode of a notice that names none, and the reason.

    "auto" is the micro-batch if its gradients fit the memory budget and the window's end would
    miss the deadline or cost more time than the gradients do; else the window.
    """
    if facts.stop_at == "micro-batch":
        return "micro-batch", "stop_at says so"
    if facts.window is None:
        return "micro-batch", "how long a window is was not seen yet"
    if facts.stop_at == "window":
        return "window", "stop_at says so"
    budget, whole = facts.memory_budget, facts.state_bytes + facts.gradient_bytes
    if budget is not None and whole > budget:
        return "window", f"gradients and state are {whole} bytes, over the budget of {budget}"
    if facts.micro_batch_s is None or facts.seconds_per_byte is None:
        return "micro-batch", "nothing was measured yet"
    wait_s = max(facts.window - facts.micro, 0) * facts.micro_batch_s
    save_s = predicted_save_s(facts.state_bytes, facts.seconds_per_byte)
    if seconds_left is not None and wait_s + save_s > seconds_left:
        return "micro-batch", f"the window's end, {wait_s:.1f} s away, would miss the deadline"
    extra_s = READ_AND_WRITE * facts.gradient_bytes * facts.seconds_per_byte
    if wait_s > extra_s:
        return "micro-batch", f"its gradients cost {extra_s:.1f} s, the window's end {wait_s:.1f}"
    return "window", f"its end is {wait_s:.1f} s away, gradients would cost {extra_s:.1f}"


def predicted_save_s(num_bytes: int, seconds_per_byte: float) -> float:
    """Return the seconds predicted for a save of so many bytes, with some caution."""
    return CAUTION * num_bytes * seconds_per_byte


def must_tighten_after_s(facts: StopFacts, seconds_left: float) -> float:
    """Return the seconds from now after which a window stop must settle for the micro-batch.

    Early enough for two more micro-batches (the one under way and the one that ranks ahead are
    in) and the save with gradients, for which a share is reserved where none was measured.
    """
    if facts.seconds_per_byte is None:
        save_s = UNMEASURED_SHARE * seconds_left
    else:
        whole = facts.state_bytes + facts.gradient_bytes
        save_s = predicted_save_s(whole, facts.seconds_per_byte)
    return max(0.0, seconds_left - save_s - 2 * (facts.micro_batch_s or 0.0))


# ---- the estimates


FRESH_MEMORY = 5  # times as slow as memory that was used before


class SaveEstimator:
    """Collects facts for these decisions. Any thread; never blocks.

    Attributes:
        timings: Timings of this rank.
    """

    def __init__(
        self, options: Options, registry: Registry, position: ProgressCounter, timings: Timings
    ) -> None:
        self._options = options
        self._registry = registry
        self._position = position
        self.timings = timings
        self._logged = False

    def stop_facts(self) -> StopFacts:
        """Return the facts as of now."""
        weight = weigh(self._registry, gradients=False)
        budget = self._options.memory_budget
        return StopFacts(
            stop_at=self._options.stop_at,
            micro=self._position.micro,
            window=self._position.window or self._options.accumulate,
            micro_batch_s=self.timings.micro_batch_s,
            state_bytes=weight.state,
            gradient_bytes=weight.possible_gradients,
            seconds_per_byte=self.timings.seconds_per_byte,
            memory_budget=budget_bytes(budget.share, budget.num_bytes),
        )

    def describe(self) -> str:
        """Describe where a stop will fall, as far as is known at start-up."""
        mode, _ = choose_mode(self.stop_facts(), None)
        if self._options.stop_at == "auto" and mode == "micro-batch":
            return "the micro-batch, or on its window's end where that is cheaper and in time"
        return "the window's end" if self._options.stop_at == "window" else f"the {mode}"

    def mode(self, seconds_left: float | None) -> Mode:
        """Return the mode of a notice that names none."""
        mode, reason = choose_mode(self.stop_facts(), seconds_left)
        if self._options.stop_at == "auto" and not self._logged:
            self._logged = True
            logger.debug("stops will fall on the %s: %s", mode, reason)
        return mode

    def save_s(self) -> float:
        """Return the shortest time a save would take now; 0 where nothing was measured.

        At a boundary, on the training thread: it reads the gradients. The shortest, since the
        estimate decides whether to try at all: a slower save is abandoned at the deadline, and
        costs nothing.
        """
        now_bytes = weigh(self._registry, gradients=True).now
        return now_bytes * (self.timings.least_seconds_per_byte or 0.0)

    def memory_s(self) -> float | None:
        """Return the seconds of a save to shared memory now; None: nothing was measured.

        With encryption, memory holds a save twice, and the encryption speed is measured here: some
        milliseconds, on the training thread, once an attempt ends.
        """
        per_byte = self.timings.copy_seconds_per_byte
        if per_byte is None:
            return None
        if self._options.encrypt_to:  # one thread, and memory that is as slow as fresh memory
            per_byte += 1 / bytes_per_s() + FRESH_MEMORY * per_byte
        return per_byte * weigh(self._registry, gradients=True).now

    def tighten_after_s(self, seconds_left: float) -> float:
        """See `must_tighten_after_s`."""
        return must_tighten_after_s(self.stop_facts(), seconds_left)


# ---- bytes of a snapshot of the registered objects: reads sizes, copies nothing


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the whole state, not of one rank's part.

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


def weigh(registry: Registry, *, gradients: bool) -> StateBytes:
    """Return an estimate: training may add optimizer state later.

    `gradients`: count the present ones. Only for the training thread, at a boundary: to read
    `.grad` while another thread is in a backward corrupts torch's memory.
    """
    state = there = possible = 0
    for model in registry.models:
        state += sum(_bytes(buffer) for buffer in model.module.buffers())
        now, unsharded = fsdp.gradient_bytes(model.wrapped)
        there, possible = there + now, possible + unsharded
    for parameter in registry.trained_parameters().values():
        state += _bytes(parameter)
        if gradients and parameter.grad is not None:
            there += _bytes(parameter.grad)
        possible += _bytes(parameter) if parameter.requires_grad else 0
    for optimizer in registry.optimizers:
        for items in list(optimizer.optimizer.state.values()):
            if isinstance(items, dict):
                values = list(items.values())
                state += sum(_bytes(v) for v in values if isinstance(v, torch.Tensor))
    return StateBytes(state, there, possible)


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

    Ranks share the state equal on all; the gradients of an open window mostly differ.
    """
    shared = any(isinstance(m.reducing, DistributedDataParallel) for m in registry.models)
    weight = weigh(registry, gradients=False)
    own = weight.possible_gradients if gradients else 0
    return weight.state // (world if shared else 1) + own
