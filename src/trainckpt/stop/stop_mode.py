"""Choose where a stop falls: on the next micro-batch, or on its window's end.

`choose_mode` and `must_tighten_after_s` are pure functions of measured facts (`StopFacts`), which
`StopModeChooser` collects. Durations are seconds, sizes bytes. An unmeasured value is None; then
the guarantee is chosen: the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.replicate.uploads import CAUTION
from trainckpt.save.estimates import gradient_bytes, shard_bytes, weigh
from trainckpt.storage.host_resources import budget_bytes

if TYPE_CHECKING:
    from trainckpt.attempt.options import Options
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.notice import Mode
    from trainckpt.save.estimates import Timings
    from trainckpt.state.registry import Registry


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
        gradient_bytes: Bytes that the open window's gradients add, those of all ranks.
        seconds_per_byte: Of a whole save, from the call to the commit.
        file_bytes: Size of this rank's shard file, with those gradients.
        memory_budget: Bytes for this rank's saves: its share of its host's.
    """

    stop_at: str
    micro: int = 0
    window: int | None = None
    micro_batch_s: float | None = None
    state_bytes: int = 0
    gradient_bytes: int = 0
    seconds_per_byte: float | None = None
    file_bytes: int = 0
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
    budget, file_bytes = facts.memory_budget, facts.file_bytes
    if budget is not None and file_bytes > budget:
        why = f"this rank's state and gradients are {file_bytes} bytes, over its budget of {budget}"
        return "window", why
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


class StopModeChooser:
    """Collects the facts for these decisions. Any thread; never blocks."""

    def __init__(
        self,
        *,
        options: Options,
        registry: Registry,
        position: ProgressCounter,
        timings: Timings,
        world_size: int,
        ranks_here: int,
    ) -> None:
        """`ranks_here`: the number of ranks on this host, which share its memory budget."""
        self._options = options
        self._world_size, self._ranks_here = world_size, ranks_here
        self._registry = registry
        self._position = position
        self._timings = timings
        self._logged = False

    def facts(self) -> StopFacts:
        """Return the facts as of now."""
        return StopFacts(
            stop_at=self._options.stop_at,
            micro=self._position.micro,
            window=self._position.window or self._options.accumulate,
            micro_batch_s=self._timings.micro_batch_s,
            state_bytes=weigh(self._registry, gradients=False).state,
            gradient_bytes=gradient_bytes(self._registry, self._world_size),
            seconds_per_byte=self._timings.seconds_per_byte,
            file_bytes=shard_bytes(self._registry, self._world_size, gradients=True),
            memory_budget=self._own_budget(),
        )

    def _own_budget(self) -> int | None:
        """Return this rank's share of `memory_budget`; None: no limit is known."""
        option = self._options.memory_budget
        budget = budget_bytes(option.share, option.num_bytes)
        return None if budget is None else budget // self._ranks_here

    def describe(self) -> str:
        """Describe where a stop will fall, as far as is known at start-up."""
        mode, _ = choose_mode(self.facts(), None)
        if self._options.stop_at == "auto" and mode == "micro-batch":
            return "the micro-batch, or on its window's end where that is cheaper and in time"
        return "the window's end" if self._options.stop_at == "window" else f"the {mode}"

    def mode(self, seconds_left: float | None) -> Mode:
        """Return the mode of a notice that names none."""
        mode, reason = choose_mode(self.facts(), seconds_left)
        if self._options.stop_at == "auto" and not self._logged:
            self._logged = True
            logger.debug("stops will fall on the %s: %s", mode, reason)
        return mode

    def tighten_after_s(self, seconds_left: float) -> float:
        """See `must_tighten_after_s`."""
        return must_tighten_after_s(self.facts(), seconds_left)
