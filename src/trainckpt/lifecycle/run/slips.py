"""Slips in a loop that cost a run its work and that nothing else shows: said once, and early.

no boundary   optimizer steps are taken and no boundary is reached: nothing is saved, and no stop is
              acted on. Some steps may warm the script up; inside `ckpt.epochs()` it trains
other epochs  the run goes on in a later epoch, and the loop never asked which
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.log import logger

if TYPE_CHECKING:
    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.run.position import Position

WARM_UP_STEPS = 20  # so many say nothing yet, where nobody knows whether training has begun
NO_BOUNDARY = "loop over ckpt.batches(), or call ckpt.boundary() before each micro-batch"


class Slips:
    """Watches one attempt of one rank.

    Attributes:
        knows_epoch: The script has asked which epoch the run is in, or is told by another way.
    """

    def __init__(self, position: Position) -> None:
        self.knows_epoch = self._has_nothing_left = False
        self._position = position
        self._step, self._patience = 0, WARM_UP_STEPS
        self._resumed_at: Cursor | None = None

    @property
    def trained(self) -> int:
        """Steps that this attempt took to train: none if no epoch was left to it."""
        return 0 if self._has_nothing_left else self._steps

    def begin(self, resumed_at: Cursor | None) -> None:
        """The attempt may train from now on."""
        self._step, self._patience = self._position.step, WARM_UP_STEPS
        self._resumed_at = resumed_at
        self._position.on_step = self._count

    def enter_epochs(self, *, has_any: bool) -> None:
        """`ckpt.epochs()` was begun: what steps from now on is training, if it has an epoch."""
        self.knows_epoch = True
        self._has_nothing_left = not has_any
        if has_any:
            self._patience = self._steps + 1

    def reach(self, *, asks: bool) -> None:
        """The first boundary was reached.

        Args:
            asks: A batch is fetched next, and no hook of the script's was given the cursor.
        """
        self._position.on_step = None
        at = self._resumed_at
        knows = self.knows_epoch or self._position.epochs_are_ours
        if asks and not knows and at is not None and at.epoch:
            logger.warning(
                "the run goes on in epoch %d (the first is 0), and the loop has not asked which: "
                "one over range(E) trains E more, not the rest. Loop over ckpt.epochs(E), or "
                "range(ckpt.cursor.epoch, E); one that ends by itself is right as it is",
                at.epoch,
            )

    def end(self) -> None:
        """The script is done; a resumed one is judged by its arrival."""
        if self._position.on_step is not None and self._resumed_at is None and self.trained:
            self._say()

    @property
    def _steps(self) -> int:
        return self._position.step - self._step

    def _count(self) -> None:
        if self._steps > self._patience:
            self._say()

    def _say(self) -> None:
        self._position.on_step = None
        logger.warning(
            "%d optimizer steps were taken and no boundary was reached: nothing is saved before "
            "the end, no stop is acted on, and what a resumed run trains is refused. %s",
            self._steps, NO_BOUNDARY[0].upper() + NO_BOUNDARY[1:],
        )  # fmt: skip
