"""Detect mistakes in the training loop that cost a run its work; each is logged once, and early.

no boundary   optimizer steps are taken and no boundary is reached: nothing is saved, and no stop is
              acted on. Some steps may warm the script up; inside `ckpt.epochs()` it trains
other epochs  the run goes on in a later epoch, and the loop never read which
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger

if TYPE_CHECKING:
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.format.cursor import Cursor

WARM_UP_STEPS = 20  # steps allowed without a boundary, while training may not have begun
NO_BOUNDARY = "loop over ckpt.batches(), or call ckpt.boundary() before each micro-batch"


class LoopChecks:
    """Loop checks of one attempt of one rank.

    Attributes:
        knows_epoch: The script has read the run's epoch, or has it by another way.
    """

    def __init__(self, position: ProgressCounter) -> None:
        self.knows_epoch = self._has_nothing_left = False
        self._position = position
        self._step, self._allowed_steps = 0, WARM_UP_STEPS
        self._resumed_at: Cursor | None = None

    @property
    def trained(self) -> int:
        """Steps that this attempt took to train: none if no epoch was left to it."""
        return 0 if self._has_nothing_left else self._steps

    def begin(self, resumed_at: Cursor | None) -> None:
        """Start the checks: the attempt may train from now on."""
        self._step, self._allowed_steps = self._position.step, WARM_UP_STEPS
        self._resumed_at = resumed_at
        self._position.on_step = self._count

    def enter_epochs(self, *, has_any: bool) -> None:
        """Note that `ckpt.epochs()` was begun: later steps are training, if it has an epoch."""
        self.knows_epoch = True
        self._has_nothing_left = not has_any
        if has_any:
            self._allowed_steps = self._steps + 1

    def on_first_boundary(self, *, asks: bool) -> None:
        """Note the first boundary.

        Args:
            asks: A batch is fetched next, and no hook of the script got the cursor.
        """
        self._position.on_step = None
        cursor = self._resumed_at
        knows = self.knows_epoch or self._position.epochs_are_ours
        if asks and not knows and cursor is not None and cursor.epoch:
            logger.warning(
                "the run goes on in epoch %d (the first is 0), and the loop has not asked which: "
                "one over range(E) trains E more, not the rest. Loop over ckpt.epochs(E), or "
                "range(ckpt.cursor.epoch, E); one that ends by itself is right as it is",
                cursor.epoch,
            )

    def end(self) -> None:
        """The script is done; a resumed one is judged by its arrival."""
        if self._position.on_step is not None and self._resumed_at is None and self.trained:
            self._warn()

    @property
    def _steps(self) -> int:
        return self._position.step - self._step

    def _count(self) -> None:
        if self._steps > self._allowed_steps:
            self._warn()

    def _warn(self) -> None:
        self._position.on_step = None
        logger.warning(
            "%d optimizer steps were taken and no boundary was reached: nothing is saved before "
            "the end, no stop is acted on, and what a resumed run trains is refused. %s",
            self._steps,
            NO_BOUNDARY[0].upper() + NO_BOUNDARY[1:],
        )
