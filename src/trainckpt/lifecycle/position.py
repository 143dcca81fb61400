"""The position: counts steps, micro-batches and epochs, and says the cursor at each boundary.

    step      counted by a hook on the first optimizer (or by the scaler's updates, since a
              scaler may skip a step)
    batches   read from the loader at each boundary, so what was fetched ahead never counts
    epoch     set by `epochs()`; in loops of the user's own, each new pass of the loader

Pure counting; one rank; the training thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.format.cursor import Cursor

if TYPE_CHECKING:
    import torch

    from trainckpt.data.loader import TrackedLoader


class Position:
    """Where this rank is.

    Attributes:
        between_batches: As of the last boundary: no loop body was left half-way, so a resume can
            begin there even if it is the entry of an evaluation.
    """

    def __init__(self) -> None:
        self._cursor = Cursor()
        self._steps = 0
        self._steps_at_boundary = 0
        self._loader: TrackedLoader | None = None
        self._seen_batches = self._seen_samples = self._seen_passes = 0
        self._outside = False  # a micro-batch begun by `ckpt.boundary()`, without a loader
        self._epochs_are_ours = False
        self._epoch_is_fresh = False  # entered, and the loader's pass for it not yet begun
        self.between_batches = True

    @property
    def cursor(self) -> Cursor:
        """The cursor; inside a loop body, of the micro-batch being trained."""
        if self._steps != self._steps_at_boundary:
            return replace(self._cursor, step=self._steps, micro=0)
        return self._cursor

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this optimizer's completed steps."""
        optimizer.register_step_post_hook(lambda *_: self._count_step())

    def watch_scaler(self, scaler: Any) -> None:
        """Count this GradScaler's updates instead: it may skip an optimizer's step."""
        update = scaler.update

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._count_step()
            return result

        scaler.update = counted

    def watch_loader(self, loader: TrackedLoader) -> None:
        """Read batches and samples from this loader."""
        self._loader = loader
        self._mark_seen()

    def restore(self, cursor: Cursor) -> None:
        """Go on counting from a saved cursor; the loader has been restored before."""
        self._cursor = replace(cursor, evaluations=0)
        self._steps = self._steps_at_boundary = cursor.step
        self._mark_seen()

    def manage_epochs(self) -> None:
        """From now on `enter_epoch` alone counts epochs, not the passes of the loader."""
        self._epochs_are_ours = True

    def enter_epoch(self, epoch: int) -> None:
        """The epoch before is over; the loader's next pass belongs to this one."""
        self._cursor = replace(self.cursor, epoch=epoch, batches=0)
        self._epoch_is_fresh = True

    @property
    def pass_is_over(self) -> bool:
        """True if the loader's pass for the cursor's epoch has ended: only what follows is left."""
        return self._loader is not None and self._loader.exhausted and self._cursor.batches > 0

    def reach_boundary(self, *, evaluation: bool = False) -> Cursor:
        """Count what was trained since the last boundary; returns the cursor of this one."""
        self.between_batches = not (self._outside if self._loader is None else self._loader.in_pass)
        batches, samples = self._trained()
        self._outside = False
        at = self._cursor
        micro = at.micro + batches
        if self._steps != self._steps_at_boundary:
            self._steps_at_boundary = self._steps
            micro = 0
        self._cursor = Cursor(
            epoch=self._epoch(),
            step=self._steps,
            micro=micro,
            batches=self._batches_of_epoch(batches),
            micro_batches=at.micro_batches + batches,
            samples=at.samples + samples,
            evaluations=at.evaluations + 1 if evaluation else 0,
        )
        return self._cursor

    def begin_outside_batch(self) -> None:
        """After `ckpt.boundary()`: the caller now fetches and trains one micro-batch."""
        self._outside = self._loader is None

    def _trained(self) -> tuple[int, int]:
        if self._loader is None:
            return int(self._outside), 0
        batches = self._loader.total_batches - self._seen_batches
        samples = self._loader.total_samples - self._seen_samples
        self._seen_batches, self._seen_samples = (
            self._loader.total_batches,
            self._loader.total_samples,
        )
        return batches, samples

    def _batches_of_epoch(self, trained: int) -> int:
        if self._loader is None:
            return self._cursor.batches + trained
        self._epoch_is_fresh = self._epoch_is_fresh and not self._loader.in_pass
        return 0 if self._epoch_is_fresh else self._loader.batches

    def _epoch(self) -> int:
        if self._loader is None or self._epochs_are_ours:
            return self._cursor.epoch
        begun = max(0, self._loader.passes_started - self._seen_passes)
        self._seen_passes += begun
        return self._cursor.epoch + begun

    def _mark_seen(self) -> None:
        if self._loader is not None:
            self._seen_batches = self._loader.total_batches
            self._seen_samples = self._loader.total_samples
            self._seen_passes = max(self._loader.passes_started, 1)

    def _count_step(self) -> None:
        self._steps += 1
