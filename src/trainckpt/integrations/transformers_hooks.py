"""Replace methods of one Trainer during its training; undone when it ends.

    _run_epoch               skips trained epochs; the interrupted one begins at its micro-batch
    get_batch_samples        returns a window with a boundary before each micro-batch
    on_epoch_begin           not called for epochs before the resumed one, and once more for that
                             one. The state of callbacks is restored after it
    _load_rng_state          does nothing: trainckpt restores the generators at the first batch
    _finalize_training       makes the run's final snapshot first
    _evaluate                for `eval_on_start`: an exception ends the attempt, as in an epoch
    args.eval_on_start       not again after a resume
    on_train_begin           of later callbacks: same as _evaluate

Each is set on that object alone, so other Trainers of the process are unchanged.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainckpt.data.prefetching import PrefetchingSource
from trainckpt.errors import ConfigurationError, Stopped
from trainckpt.integrations.accelerate_loader import ShardReader
from trainckpt.integrations.compat import replace_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.checkpointer import Checkpointer
    from trainckpt.data.loader import TrackedIterator, TrackedLoader
    from trainckpt.format.exactness import Report
    from trainckpt.integrations.transformers_state import TrainerPart


# ---- a Trainer's window, micro-batch by micro-batch
#
# The Trainer needs the whole window first: it divides each loss by the tokens of all of it. So the
# window is fetched by the Trainer's own method, at the window's first boundary. The Trainer gets an
# object with a boundary before each further micro-batch. After a resume inside a window the divisor
# comes from the snapshot, and only the rest of the window is fetched again.


class WindowAborted(BaseException):
    """A stop with `on_stop="return"` leaves the Trainer's loop in the middle of a window."""


class WindowReader(ShardReader):
    """The Trainer's loader, read window by window; see `data.prefetching.PrefetchReader`.

    Args:
        shard: The loader prepared by Accelerate.
        collect: The Trainer's own get_batch_samples.

    Attributes:
        whole: Number of micro-batches of the present window.
        left: Number of those not delivered yet.
        items: The Trainer's divisor of their losses; None if it has none.
    """

    def __init__(self, shard: Any, collect: Callable[..., tuple[list[Any], Any]]) -> None:
        super().__init__(shard)
        self.whole = self.left = 0
        self.items: Any = None
        self._collect = collect
        self._asked: tuple[int, Any] = (1, None)

    def ask(self, number: int, device: Any) -> None:
        """Set the Trainer's arguments for the next window."""
        self._asked = (number, device)

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """Yield one pass, micro-batch by micro-batch."""
        batches = super().read(open_it, resumed=resumed)
        if resumed and self.left:
            yield from self._hand_out([next(batches) for _ in range(self.left)])
        while True:
            counted = _Counted(batches)
            window, self.items = self._collect(counted, *self._asked)
            if len(window) != len(counted.taken):
                what = f"makes {len(window)} micro-batches of {len(counted.taken)}"
                raise _refusal(what)
            if any(given is not taken for given, taken in zip(window, counted.taken, strict=True)):
                raise _refusal("makes other micro-batches of those that it takes")
            if not window:
                return
            self.whole = len(window)
            yield from self._hand_out(window)

    def _hand_out(self, window: list[Any]) -> Iterator[Any]:
        self.left = len(window)
        for batch in window:
            self.left -= 1
            yield batch

    def state(self) -> dict[str, Any]:
        """Return Accelerate's epoch, and the open window."""
        items = self.items if self.left else None
        return {**super().state(), "whole": self.whole, "left": self.left, "items": items}

    def load(self, state: dict[str, Any]) -> None:
        """Restore that state."""
        super().load(state)
        self.whole, self.left, self.items = state["whole"], state["left"], state["items"]


class _Counted:
    """An iterator with a list of the batches taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.taken: list[Any] = []
        self._batches = batches

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.taken.append(batch)
        return batch


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"get_batch_samples of this Trainer {what}, so none of them is a place in the data",
        hint="leave get_batch_samples as it is in transformers.Trainer; what changes a batch "
        "belongs into the collator or training_step",
    )


class TrainedLoader:
    """The loader argument of `Checkpointer` for the Trainer's loader."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._reader.shard)

    @property
    def dataset(self) -> Any:
        """The Trainer's dataset."""
        return self._reader.shard.base_dataloader.dataset

    def __trainckpt_source__(self, name: str, report: Report) -> PrefetchingSource:
        return PrefetchingSource(self._reader, self._reader.shard.base_dataloader, name, report)


class Window:
    """The rest of a window, as iterated by the Trainer's loop.

    Args:
        first: The micro-batch taken when the window began.
        iterator: Yields the others, each after a boundary.
        reader: Has the number of micro-batches.
        begin: Called with the whole window's number of micro-batches, before the first.
    """

    def __init__(
        self,
        first: Any,
        iterator: TrackedIterator,
        reader: WindowReader,
        begin: Callable[[int], None],
    ) -> None:
        self._first = first
        self._iterator = iterator
        self._length = reader.left + 1
        self._whole = reader.whole
        self._begin = begin

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._begin(self._whole)
        yield self._first
        for _ in range(self._length - 1):
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise WindowAborted from None
            yield batch


# ---- the hooks


_OURS = "trainckpt"  # given to _run_epoch in place of a checkpoint's folder
_FOREVER = 10**9  # epochs: the Trainer counts them, and ends


class TrainerHooks:
    """The replaced methods of one Trainer.

    Args:
        trainer: Its training has just begun.
        ckpt: Its Checkpointer, resumed.
        part: The tracked state of the Trainer.
        reader: The reader of its loader.
        tracked: The loader, tracked.

    Attributes:
        installed: They are in place.
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
        self._told = -1  # the last epoch begun by the loop
        self._iterator: TrackedIterator | None = None
        self._in_epoch = False
        self._undo = ExitStack()
        self.installed = False

    def install(self, later: Iterable[Any]) -> None:
        """Set them. `later`: callbacks with their on_train_begin still to come."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        self._run_epoch = trainer._run_epoch
        self._collect = trainer.get_batch_samples
        self._load_rng = trainer._load_rng_state
        self._finalize = trainer._finalize_training
        self._evaluate = trainer._evaluate
        self._tell = handler.on_epoch_begin
        self.installed, replace = True, partial(replace_attribute, self._undo)
        replace(trainer, "_run_epoch", self.run_epoch)
        replace(trainer, "get_batch_samples", self.get_batch_samples)
        replace(trainer, "_load_rng_state", self.load_rng_state)
        replace(trainer, "_finalize_training", self.finalize)
        replace(trainer, "_evaluate", self.evaluate)
        replace(handler, "on_epoch_begin", self.on_epoch_begin)
        if self._ckpt.resumed_from is not None:
            replace(trainer.args, "eval_on_start", False)
        for one in later:
            with suppress(AttributeError, TypeError):  # one without a __dict__
                replace(one, "on_train_begin", partial(self._begin, one.on_train_begin))

    def _begin(self, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._abandoning():
            return begin(*args, **kwargs)

    def remove(self) -> None:
        """Restore the Trainer's methods, and end the loader's workers."""
        self._iterator = None
        self._tracked.shutdown()
        self._undo.close()
        self.installed = False

    def abandon(self, error: BaseException) -> None:
        """End the training by this error."""
        self.remove()
        if not isinstance(error, Stopped):
            self._ckpt.__exit__(type(error), error, None)

    # ---- in place of the Trainer's own

    def on_epoch_begin(self, args: Any, state: Any, control: Any) -> Any:
        """Pass on an epoch's begin; of the resumed one again, with the epoch of its beginning."""
        self._told += 1
        if self._part.finished or self._told < self._part.begun:
            return control
        saved_epoch, is_again = state.epoch, self._told == self._part.begun
        self._part.begun = self._told
        if is_again:
            state.epoch = float(self._told) if self._told else 0  # as the Trainer has it there
        with self._abandoning():
            control = self._tell(args, state, control)
        if is_again:
            state.epoch = saved_epoch
        return control

    def run_epoch(self, **given: Any) -> None:
        """Run an epoch, or its rest, or nothing."""
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
                with _skipping_nothing():
                    self._run_epoch(**given)
            except WindowAborted:
                self._trainer.control.should_training_stop = True
            finally:
                self._in_epoch = False

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the next window; its first boundary is here."""
        if epoch_iterator is not self._iterator:
            return self._collect(epoch_iterator, num_batches, device)
        self._reader.ask(num_batches, device)
        try:
            first = next(self._iterator)
        except StopIteration:
            if self._has_left():
                raise WindowAborted from None
            return [], None
        window = Window(first, self._iterator, self._reader, self._begin_window)
        return window, self._reader.items

    def load_rng_state(self, checkpoint: Any) -> None:
        """Leave the generators alone after trainckpt's resume."""
        if checkpoint != _OURS:
            self._load_rng(checkpoint)

    def finalize(self, *args: Any, **kwargs: Any) -> Any:
        """Finish the run, then call the Trainer's own method."""
        with self._abandoning():
            if not self._has_left():
                self._part.finished = True
                if self._tracked.in_pass and self._tracked.batches == len(self._tracked):
                    next(self._epochs)
                self._ckpt.close()
        self.remove()
        return self._finalize(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; between epochs an error must be caught here."""
        if self._in_epoch:
            return self._evaluate(*args, **kwargs)
        with self._abandoning():
            return self._evaluate(*args, **kwargs)

    # ---- as the loader of an epoch

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._tracked)
        return self._iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's samplers."""
        self._reader.shard.set_epoch(epoch)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler: the Trainer itself sets its epoch."""
        return self._reader.shard.batch_sampler

    # ---- small things

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """End the attempt on an exception, and restore the Trainer's methods."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def _begin_window(self, whole: int) -> None:
        self._trainer.current_gradient_accumulation_steps = whole

    def _has_left(self) -> bool:
        attempt = self._ckpt._attempt
        return attempt is not None and attempt.shutdown.left


@contextmanager
def _skipping_nothing() -> Iterator[None]:
    """Disable the Trainer's skip_first_batches for the tracked loader during an epoch."""
    module: Any = import_module("transformers.trainer")
    skip = module.skip_first_batches

    def skip_unless_ours(loader: Any, num_batches: int = 0) -> Any:
        return loader if isinstance(loader, TrainerHooks) else skip(loader, num_batches)

    with ExitStack() as undo:
        replace_attribute(undo, module, "skip_first_batches", skip_unless_ours)
        yield
