"""What is changed on one Trainer while it trains; undone when its training ends.

_run_epoch               epochs that were trained are passed over; the one the run stopped in
                         begins at its micro-batch
get_batch_samples        hands a window out with a boundary before each micro-batch
on_epoch_begin           not told again of an epoch that callbacks know
_load_rng_state          nothing: the random generators are put back by us, at the first batch
_finalize_training       the run's final snapshot comes first
_evaluate                of `eval_on_start`: what it raises ends the attempt, as in an epoch
args.eval_on_start       not again after a resume
on_train_begin           of callbacks that come after ours: as _evaluate

Each is set on that object alone, so other Trainers of the process are as they were.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainckpt.integrations.transformers_window import Left, Window
from trainckpt.lifecycle.stopping.stopped import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.data.loader import TrackedIterator, TrackedLoader
    from trainckpt.integrations.transformers_state import TrainerPart
    from trainckpt.integrations.transformers_window import WindowReader
    from trainckpt.lifecycle.checkpointer import Checkpointer

_OURS = "trainckpt"  # given to _run_epoch in place of a checkpoint's folder
_FOREVER = 10**9  # epochs: the Trainer counts them, and ends


class Hooks:
    """The changes on one Trainer.

    Args:
        trainer: Whose training has just begun.
        ckpt: Its Checkpointer, resumed.
        part: What of the Trainer is tracked.
        reader: Of its loader.
        tracked: The loader, tracked.
    """

    def __init__(
        self,
        trainer: Any,
        ckpt: Checkpointer,
        part: TrainerPart,
        reader: WindowReader,
        tracked: TrackedLoader,
    ) -> None:
        self._trainer, self._ckpt, self._part = trainer, ckpt, part
        self._reader, self._tracked = reader, tracked
        self._epochs = ckpt.epochs(_FOREVER)
        self._told = -1  # epochs the loop has told of
        self._iterator: TrackedIterator | None = None
        self._in_epoch = False
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """They are in place."""
        return bool(self._undo)

    def install(self, later: Iterable[Any]) -> None:
        """Set them. `later`: callbacks that are told after ours that the training begins."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        self._run_epoch = trainer._run_epoch
        self._collect = trainer.get_batch_samples
        self._load_rng = trainer._load_rng_state
        self._finalize = trainer._finalize_training
        self._evaluate = trainer._evaluate
        self._tell = handler.on_epoch_begin
        self._set(trainer, "_run_epoch", self.run_epoch)
        self._set(trainer, "get_batch_samples", self.get_batch_samples)
        self._set(trainer, "_load_rng_state", self.load_rng_state)
        self._set(trainer, "_finalize_training", self.finalize)
        self._set(trainer, "_evaluate", self.evaluate)
        self._set(handler, "on_epoch_begin", self.on_epoch_begin)
        if self._ckpt.resumed_from is not None:
            self._set(trainer.args, "eval_on_start", False)

        for one in later:
            with suppress(AttributeError, TypeError):  # one without a __dict__
                self._set(one, "on_train_begin", partial(self._begin, one.on_train_begin))

    def _begin(self, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._abandoning():
            return begin(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there; workers end, as they do where nobody holds the loader."""
        self._iterator = None
        self._tracked.shutdown()
        while self._undo:
            self._undo.pop()()

    def abandon(self, error: BaseException) -> None:
        """The training ends by this error."""
        self.remove()
        if not isinstance(error, Stopped):
            self._ckpt.__exit__(type(error), error, None)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        had, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    # ---- in place of the Trainer's own

    def on_epoch_begin(self, args: Any, state: Any, control: Any) -> Any:
        """Tell of an epoch, once in the run."""
        self._told += 1
        if self._part.finished or self._told <= self._part.begun:
            return control
        self._part.begun = self._told
        with self._abandoning():
            return self._tell(args, state, control)

    def run_epoch(self, **given: Any) -> None:
        """Run an epoch, or what is left of it, or nothing."""
        if self._part.finished or given["epoch"] < self._ckpt.cursor.epoch:
            return
        next(self._epochs)
        done = self._tracked.batches if self._tracked.in_pass else 0
        given["train_dataloader"] = self
        if done:
            given.update(
                resume_from_checkpoint=_OURS,
                epochs_trained=given["epoch"],
                steps_trained_in_current_epoch=done,
            )
        with self._abandoning():
            try:
                self._in_epoch = True
                with _SkipsNothing():
                    self._run_epoch(**given)
            except Left:
                self._trainer.control.should_training_stop = True
            finally:
                self._in_epoch = False

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Give the next window; its first boundary is here."""
        if epoch_iterator is not self._iterator:
            return self._collect(epoch_iterator, num_batches, device)
        self._reader.ask(num_batches, device)
        try:
            first = next(self._iterator)
        except StopIteration:
            if self._has_left():
                raise Left from None
            return [], None
        window = Window(first, self._iterator, self._reader, self._begin_window)
        return window, self._reader.items

    def load_rng_state(self, checkpoint: Any) -> None:
        """Leave the generators alone after our own resume."""
        if checkpoint != _OURS:
            self._load_rng(checkpoint)

    def finalize(self, *args: Any, **kwargs: Any) -> Any:
        """The run is finished; then the Trainer's last words."""
        with self._abandoning():
            if not self._has_left():
                self._part.finished = True
                if self._tracked.in_pass and self._tracked.batches == len(self._tracked):
                    next(self._epochs)
                self._ckpt.close()
        self.remove()
        return self._finalize(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; between epochs nobody else would hear of an error."""
        if self._in_epoch:
            return self._evaluate(*args, **kwargs)
        with self._abandoning():
            return self._evaluate(*args, **kwargs)

    # ---- as the loader of an epoch

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._tracked)
        return self._iterator

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader's samplers."""
        self._reader.shard.set_epoch(epoch)

    @property
    def batch_sampler(self) -> Any:
        """Told of the epoch by the Trainer itself."""
        return self._reader.shard.batch_sampler

    # ---- small things

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """What is raised ends the attempt, and this Trainer's loop is its own again."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def _begin_window(self, whole: int) -> None:
        self._trainer.current_gradient_accumulation_steps = whole

    def _has_left(self) -> bool:
        attempt = self._ckpt._attempt
        return attempt is not None and attempt.departure.left


class _SkipsNothing:
    """While an epoch begins, the Trainer's skip_first_batches leaves our loader as it is."""

    def __enter__(self) -> None:
        module: Any = import_module("transformers.trainer")
        self._module, self._skip = module, module.skip_first_batches
        module.skip_first_batches = self._skip_unless_ours

    def __exit__(self, *_: object) -> None:
        self._module.skip_first_batches = self._skip

    def _skip_unless_ours(self, loader: Any, num_batches: int = 0) -> Any:
        if isinstance(loader, Hooks):
            return loader
        return self._skip(loader, num_batches)
