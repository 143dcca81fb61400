"""The outlook: what is known about the next micro-batches and saves when a notice comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.encryption.sealed_file import bytes_per_s
from trainckpt.lifecycle.deciding import stop_plan
from trainckpt.lifecycle.deciding.stop_plan import StopFacts
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.memory import budget_bytes
from trainckpt.state.weight import weigh

if TYPE_CHECKING:
    from trainckpt.lifecycle.deciding.pace import Pace
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.lifecycle.run.position import Position
    from trainckpt.ranks.decision import Mode
    from trainckpt.state.registry import Registry

FRESH_MEMORY = 5  # times as slow as memory that was used before


class Outlook:
    """Gathers facts for the decisions of `stop_plan`. Any thread; blocks nowhere.

    Attributes:
        pace: Of this rank.
    """

    def __init__(
        self, options: Options, registry: Registry, position: Position, pace: Pace
    ) -> None:
        self._options = options
        self._registry = registry
        self._position = position
        self.pace = pace
        self._said = False

    def facts(self) -> StopFacts:
        """As of now."""
        weight = weigh(self._registry, gradients=False)
        budget = self._options.memory_budget
        return StopFacts(
            stop_at=self._options.stop_at,
            micro=self._position.micro,
            window=self._position.window or self._options.accumulate,
            micro_batch_s=self.pace.micro_batch_s,
            state_bytes=weight.state,
            gradient_bytes=weight.possible_gradients,
            seconds_per_byte=self.pace.seconds_per_byte,
            memory_budget=budget_bytes(budget.share, budget.num_bytes),
        )

    def in_words(self) -> str:
        """Where a stop will fall, as far as that is known at start-up."""
        mode, _ = stop_plan.choose_mode(self.facts(), None)
        if self._options.stop_at == "auto" and mode == "micro-batch":
            return "the micro-batch, or on its window's end where that is cheaper and in time"
        return "the window's end" if self._options.stop_at == "window" else f"the {mode}"

    def mode(self, seconds_left: float | None) -> Mode:
        """What a notice means that does not say where the stop may fall."""
        mode, why = stop_plan.choose_mode(self.facts(), seconds_left)
        if self._options.stop_at == "auto" and not self._said:
            self._said = True
            logger.info("a stop falls on the %s: %s", mode, why)
        return mode

    def save_s(self) -> float:
        """How long a save would take here and now at the best; 0 where nothing was measured.

        At a boundary, on the training thread: it looks at the gradients.
        At the best, since it decides whether to try at all: a save that turns out slower is given
        up at the deadline, and costs nothing.
        """
        now_bytes = weigh(self._registry, gradients=True).now
        return now_bytes * (self.pace.least_seconds_per_byte or 0.0)

    def memory_s(self) -> float | None:
        """How long a save to shared memory would take here and now; None: nothing was measured.

        Where saves are encrypted, memory holds them twice, and the second time is tried here: some
        milliseconds, on the training thread, once an attempt ends.
        """
        per_byte = self.pace.copy_seconds_per_byte
        if per_byte is None:
            return None
        if self._options.encrypt_to:  # one thread, and memory that is as slow as fresh memory
            per_byte += 1 / bytes_per_s() + FRESH_MEMORY * per_byte
        return per_byte * weigh(self._registry, gradients=True).now

    def tighten_after_s(self, seconds_left: float) -> float:
        """See `stop_plan.must_tighten_after_s`."""
        return stop_plan.must_tighten_after_s(self.facts(), seconds_left)
