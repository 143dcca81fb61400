"""The progress counter: counts steps, micro-batches and epochs, and gives the cursor at boundaries.

    step      counted by a hook on the first optimizer, or on one inside it that a script steps by
              other methods, as SAM's second_step; or by the scaler's updates, since a scaler may
              skip a step; with none, every `accumulate` micro-batches
    batches   read from the loader at each boundary, so batches fetched ahead never count
    epoch     set by `epochs()`; in loops of the user's own, each new pass of the loader

Pure counting; one rank; the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.attempt.log import logger
from trainckpt.attempt.time_keeper import MICRO_BATCHES, STEPS, TimeKeeper
from trainckpt.format.cursor import Cursor
from trainckpt.state.adapters.optimizer import inner_optimizers
from trainckpt.state.step_hooks import counted_optimizer, untraced

if TYPE_CHECKING:
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.state.registry import Registry


NO_STEP_AFTER = 256  # micro-batches: larger windows are rare


class ProgressCounter:
    """Progress of this rank.

    Attributes:
        between_batches: As of the last boundary: no loop body was left half-way, so a resume can
            begin there even if it is the entry of an evaluation.
        step: Completed steps, as of now.
        micro: Micro-batches of the open window, as of the last boundary.
        window: Micro-batches of the last window that ended; None before.
        epochs_are_ours: Passes of the loader do not count them.
        checks: Checks of the training loop.
    """

    def __init__(self, accumulate: int | None = None, times: TimeKeeper | None = None) -> None:
        """`times`: told the counts, so that they outlive this process."""
        self._times = times or TimeKeeper(0.0)
        self.between_batches = True
        self.step = 0
        self.micro = 0
        self.window: int | None = None
        self._counts_steps_itself = accumulate  # cleared once something is watched for steps
        self._step_at_boundary = 0
        self._watched = ""  # the optimizer that has not taken its first step
        self._in_step = False  # of an optimizer with another one inside
        self._epoch = self._batches = self._evaluations = 0
        self._micro_batches = self._samples = 0
        self._loader: TrackedLoader | None = None  # the first one
        self._loaders: list[TrackedLoader] = []
        self._seen_batches = self._seen_samples = self._seen_passes = 0
        self._outside = False  # a micro-batch begun by `ckpt.boundary()`, without a loader
        self._window = (0, 0, 0, 0, 0, 0)  # where the open window began
        self.epochs_are_ours = False
        self._epoch_is_fresh = False  # entered, and the loader's pass for it not yet begun
        self.checks = LoopChecks(self)

    @property
    def cursor(self) -> Cursor:
        """The cursor; inside a loop body, of the micro-batch being trained."""
        return Cursor(
            epoch=self._epoch,
            step=self.step,
            micro=self.micro if self.step == self._step_at_boundary else 0,
            batches=self._batches,
            micro_batches=self._micro_batches,
            samples=self._samples,
            evaluations=self._evaluations,
        )

    def window_start(self) -> Cursor:
        """Return the cursor at the beginning of the open window."""
        epoch, step, batches, micro_batches, samples, evaluations = self._window
        return Cursor(
            epoch=epoch,
            step=step,
            micro=0,
            batches=batches,
            micro_batches=micro_batches,
            samples=samples,
            evaluations=evaluations,
        )

    def watch_steps(self, registry: Registry) -> str:
        """Count the updates of the first scaler, if enabled, else the first optimizer's steps.

        Returns why they cannot be counted, or "".
        """
        for engine in registry.engines:  # it steps torch's optimizer once for each parameter group
            self.watch_calls(engine.zero, "step")
            return ""
        for generic in registry.generics:
            scaler = generic.target
            # a disabled one is asked for no update where a script steps past it
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                self.watch_calls(scaler, "update")  # it may skip an optimizer's step
                return ""
        for first in registry.optimizers[:1]:
            counted = counted_optimizer(first.optimizer)
            if counted is not None:
                self.watch_optimizer(counted)
                self._watched = f"{first.name} (a {type(first.optimizer).__name__})"
            elif not self._counts_steps_itself:
                kind = type(first.optimizer).__name__
                return (
                    f"steps are not counted, so nothing is saved by their number: {first.name} (a "
                    f"{kind}) never calls Optimizer.__init__, so its hooks are not called; let it, "
                    "or track the optimizer inside it first, or say accumulate="
                )
        return ""

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this optimizer's completed steps, and those that one inside it takes alone."""
        self._counts_steps_itself = None
        inside = (inner for _, inner in inner_optimizers(optimizer))
        inner = next((one for one in inside if counted_optimizer(one) is one), None)
        if inner is not None:
            optimizer.register_step_pre_hook(untraced(lambda *_: self._enter_step()))
            inner.register_step_post_hook(untraced(lambda *_: self._count_step(is_inner=True)))
        optimizer.register_step_post_hook(untraced(lambda *_: self._count_step()))

    def watch_calls(self, stepping: Any, name: str) -> None:
        """Count the calls of a method, such as the updates of a GradScaler."""
        self._counts_steps_itself = None
        method = getattr(stepping, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._count_step()
            return result

        setattr(stepping, name, counted)

    def watch_loader(self, loader: TrackedLoader) -> None:
        """Read batches and samples from the first loader; tell all where a window begins."""
        self._loaders.append(loader)
        if self._loader is None:
            self._loader = loader
            self._mark_seen()

    def restore(
        self, cursor: Cursor, *, window: Cursor | None = None, arrived: bool = False
    ) -> None:
        """Go on counting from a saved cursor; the loader has been restored before.

        `window` is where the open window began. Until its boundary has `arrived`, evaluations
        are counted from 0 to the cursor's.
        """
        self._epoch, self._batches = cursor.epoch, cursor.batches
        self._evaluations = cursor.evaluations if arrived else 0
        self._micro_batches, self._samples = cursor.micro_batches, cursor.samples
        if self._loader is not None:  # the cursor is rank 0's, and ranks may differ
            self._samples = self._loader.run_samples(cursor.samples)
        self.step = self._step_at_boundary = cursor.step
        self.micro = cursor.micro
        self._epoch_is_fresh = (
            self._loader is not None and not cursor.batches
        )  # the loader may still show the epoch before
        self._mark_seen()
        if window is not None:
            self._window = (
                window.epoch,
                window.step,
                window.batches,
                window.micro_batches,
                window.samples,
                window.evaluations,
            )

    def manage_epochs(self) -> None:
        """Let `enter_epoch` alone count epochs from now on, not the passes of the loader."""
        self.epochs_are_ours = True

    def enter_epoch(self, epoch: int) -> None:
        """Begin an epoch; the loader's next pass belongs to it."""
        self._epoch, self._batches = epoch, 0
        self._epoch_is_fresh = True
        if self._loader is not None:
            self._loader.enter_epoch()

    @property
    def pass_is_over(self) -> bool:
        """True if the loader's pass for the cursor's epoch has ended."""
        return self._loader is not None and self._loader.exhausted and self._batches > 0

    # At every boundary of the run: no object is made here, the cursor only when it is wanted.
    def reach_boundary(self, *, evaluation: bool = False) -> None:
        """Count the micro-batches trained since the last boundary.

        An evaluation entered in a loop body counts nothing: its micro-batch goes on after it.
        """
        loader = self._loader
        self.between_batches = not (self._outside or (loader is not None and loader.in_pass))
        if evaluation and not self.between_batches:
            self._evaluations += 1
            return
        trained, self._outside = int(self._outside), False
        if loader is None:
            # the last micro-batch of an epoch is counted after the next one was entered
            self._batches += 0 if self._epoch_is_fresh else trained
            self._epoch_is_fresh = False
        else:
            returned = loader.total_batches - self._seen_batches
            trained = returned or trained
            self._seen_batches += returned
            self._samples += loader.total_samples - self._seen_samples
            self._seen_samples = loader.total_samples
            self._count_epoch(loader)
        self._micro_batches += trained
        self.micro += trained
        if self._counts_steps_itself and self.micro >= self._counts_steps_itself:
            self.step += 1
        if self.step != self._step_at_boundary:
            self._step_at_boundary = self.step
            self.window, self.micro = self.micro, 0
        numbers = self._times.numbers
        numbers[STEPS], numbers[MICRO_BATCHES] = self.step, self._micro_batches
        self._evaluations = self._evaluations + 1 if evaluation else 0
        if not self.micro:
            self._mark_window()
        elif self.micro == NO_STEP_AFTER and self._watched:
            self._warn_of_no_step()

    def begin_outside_batch(self) -> None:
        """Note that the caller trains one micro-batch of its own, after `ckpt.boundary()`."""
        self._outside = True

    @property
    def is_at_boundary(self) -> bool:
        """True from `ckpt.boundary()` to the first loader's next batch, or the next step."""
        is_unread = self._loader is None or self._loader.total_batches == self._seen_batches
        return self._outside and is_unread and self.step == self._step_at_boundary

    def begin_loader_batch(self) -> None:
        """Note that the boundary is inside the tracked loader, which counts its own batches."""
        self._outside = False

    def _count_epoch(self, loader: TrackedLoader) -> None:
        if not self.epochs_are_ours and loader.passes_started > self._seen_passes:
            self._epoch += loader.passes_started - self._seen_passes
            self._seen_passes = loader.passes_started
        self._epoch_is_fresh = self._epoch_is_fresh and not loader.in_pass
        self._batches = 0 if self._epoch_is_fresh else loader.batches

    def _mark_window(self) -> None:
        self._window = (
            self._epoch,
            self.step,
            self._batches,
            self._micro_batches,
            self._samples,
            self._evaluations,
        )
        for loader in self._loaders:
            loader.record_window_start()

    def _mark_seen(self) -> None:
        if self._loader is not None:
            self._seen_batches = self._loader.total_batches
            self._seen_samples = self._loader.total_samples
            self._seen_passes = max(self._loader.passes_started, 1)

    def _enter_step(self) -> None:
        self._in_step = True

    def _count_step(self, *, is_inner: bool = False) -> None:
        if is_inner and self._in_step:
            return
        self._in_step, self._watched = False, ""
        self.step += 1
        self._times.numbers[STEPS] = self.step
        self.checks.on_step()

    def _warn_of_no_step(self) -> None:
        logger.warning(
            "%d micro-batches were trained, and no step of %s was counted: saves by a number of "
            "steps are not made, and a stop waits for one. Call its step(); or track first the "
            "optimizer whose step() is called; or pass accumulate=, the micro-batches of a step",
            NO_STEP_AFTER,
            self._watched,
        )
        self._watched = ""


# ---- loop checks: mistakes in the training loop, each logged once and early
#
# no boundary   optimizer steps are taken and no boundary is reached: nothing is saved, and no stop
#               is acted on. Some steps may warm the script up; inside `ckpt.epochs()` it trains
# other epochs  the run goes on in a later epoch, and the loop never read which


WARM_UP_STEPS = 20  # steps allowed without a boundary, while training may not have begun
NO_BOUNDARY = "loop over ckpt.batches(), or call ckpt.boundary() before each micro-batch"


class LoopChecks:
    """Loop checks of one attempt of one rank."""

    def __init__(self, position: ProgressCounter) -> None:
        self._knows_epoch = self._has_nothing_left = False
        self._waits_for_boundary = False  # steps are counted until the first boundary
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
        self._waits_for_boundary = True

    def note_epoch(self, *, is_known: bool = True) -> None:
        """Note that the script has read the run's epoch, or (False) has not done so yet."""
        self._knows_epoch = is_known

    def enter_epochs(self, *, has_any: bool) -> None:
        """Note that `ckpt.epochs()` was begun: later steps are training, if it has an epoch."""
        self._knows_epoch = True
        self._has_nothing_left = not has_any
        if has_any:
            self._allowed_steps = self._steps + 1

    def on_first_boundary(self, *, asks: bool) -> None:
        """Note the first boundary.

        Args:
            asks: A batch is fetched next, and no hook of the script got the cursor.
        """
        self._waits_for_boundary = False
        cursor = self._resumed_at
        knows = self._knows_epoch or self._position.epochs_are_ours
        if asks and not knows and cursor is not None and cursor.epoch:
            logger.warning(
                "the run goes on in epoch %d (the first is 0), and the loop has not asked which: "
                "one over range(E) trains E more, not the rest. Loop over ckpt.epochs(E), or "
                "range(ckpt.cursor.epoch, E); one that ends by itself is right as it is",
                cursor.epoch,
            )

    def end(self) -> None:
        """Check a finished script; a resumed one by its position at the resume."""
        if self._waits_for_boundary and self._resumed_at is None and self.trained:
            self._warn()

    @property
    def _steps(self) -> int:
        return self._position.step - self._step

    def on_step(self) -> None:
        """Check the number of steps without a boundary, after each that is counted by a hook."""
        if self._waits_for_boundary and self._steps > self._allowed_steps:
            self._warn()

    def _warn(self) -> None:
        self._waits_for_boundary = False
        logger.warning(
            "%d optimizer steps were taken and no boundary was reached: nothing is saved before "
            "the end, no stop is acted on, and what a resumed run trains is refused. %s",
            self._steps,
            NO_BOUNDARY[0].upper() + NO_BOUNDARY[1:],
        )
