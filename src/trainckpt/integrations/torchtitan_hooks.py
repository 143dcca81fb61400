"""Replace methods of one torchtitan Trainer during its training, and track its counters.

    batch_generator          yields the batches of trainckpt's loader; the first boundary of each
                             window lies where its first batch is asked for
    forward_backward_step    has a boundary before each further micro-batch. After a resume inside a
                             window it returns the saved losses of those trained before

torchtitan first clears the gradients and then asks for the window's batches, so a boundary is past
`zero_grad`. After a resume inside a window the whole window is fetched again, and its number of
tokens, which divides each loss, is computed as in the first attempt.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import DataloaderExhaustedError

from trainckpt.errors import ConfigurationError
from trainckpt.integrations.compat import replace_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from trainckpt.checkpointer import Checkpointer
    from trainckpt.data.loader import TrackedIterator
    from trainckpt.integrations.torchtitan_data import WindowLoader


class TrainState:
    """Counters of a Trainer, and the losses of the open window, as one object to track.

    Args:
        trainer: The Trainer.
        loader: Its loader.

    Attributes:
        in_step: The Trainer has counted a step that it has not trained.
        losses: Of the micro-batches of the open window that were trained, on this rank.
    """

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any, loader: WindowLoader) -> None:
        self.in_step = False
        self.losses: list[torch.Tensor] = []
        self._trainer, self._loader = trainer, loader
        self._saved_sizes: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what torchtitan saves of its Trainer, and the open window."""
        trainer = self._trainer
        return {
            "step": trainer.step - self.in_step,
            "ntokens_seen": trainer.ntokens_seen,
            "losses": list(self.losses),
            "sizes": self._sizes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it; also where the Trainer has begun the step already."""
        trainer = self._trainer
        trainer.step = state["step"] + self.in_step
        trainer.ntokens_seen = state["ntokens_seen"]
        self.losses = [loss.to(trainer.device, copy=True) for loss in state["losses"]]
        self._saved_sizes = state["sizes"]

    def must_fit(self, micro: int) -> None:
        """Raise `ConfigurationError` if the rest of the open window is of another size now.

        Args:
            micro: Its micro-batches trained before the resume.
        """
        now = self._sizes()
        changed = [
            f"{name} was {was}, is {now[name]}"
            for name, was in self._saved_sizes.items()
            if now[name] != was
        ]
        if micro and changed:
            raise ConfigurationError(
                f"the snapshot lies {micro} micro-batches inside an accumulation window, which "
                f"cannot go on with another size: {'; '.join(changed)}",
                hint="resume with training.local_batch_size and training.global_batch_size as they "
                "were; another size can begin with a step (options stop_at='window', or load_step)",
            )

    def _sizes(self) -> dict[str, int]:
        return {
            "micro-batches of a window": self._loader.num_micro_batches,
            "training.local_batch_size": self._trainer.config.training.local_batch_size,
        }


class TorchtitanHooks:
    """The replaced methods of one Trainer, and its source of batches.

    Args:
        trainer: Its training has just begun.
        ckpt: Its Checkpointer, resumed.
        state: The tracked counters.
        loader: Its loader, tracked by `ckpt`.
    """

    def __init__(
        self, trainer: Any, ckpt: Checkpointer, state: TrainState, loader: WindowLoader
    ) -> None:
        self._trainer, self._state, self._loader = trainer, state, loader
        self._tracked = ckpt.loader(loader)
        self._iterator: TrackedIterator = iter(self._tracked)
        self._ahead: deque[Any] = deque()  # of the window, fetched and not taken by the Trainer
        self._number = 0  # the next micro-batch of the window that the Trainer trains
        self._entered = 0  # the last one whose boundary was passed
        self._undo = ExitStack()

    def install(self) -> None:
        """Replace the methods."""
        self._generate = self._trainer.batch_generator
        self._train = self._trainer.forward_backward_step
        replace_attribute(self._undo, self._trainer, "batch_generator", self.batch_generator)
        replace_attribute(
            self._undo, self._trainer, "forward_backward_step", self.forward_backward_step
        )

    def remove(self) -> None:
        """Restore the Trainer's methods, and end the loader's workers."""
        self._undo.close()
        self._tracked.shutdown()

    # ---- in place of the Trainer's own

    def batch_generator(self, loader: Any) -> Any:
        """Generate batches as the Trainer does, from this object in place of its loader."""
        return self._generate(self if loader is self._loader.loader else loader)

    def forward_backward_step(self, **given: Any) -> torch.Tensor:
        """Train one micro-batch, unless it was trained before the resume; return its loss."""
        number, self._number = self._number, self._number + 1
        if number < self._entered:
            return self._state.losses[number]
        if number > self._entered:
            try:
                next(self._iterator)
            except StopIteration:  # stopped, with on_stop="return"
                raise DataloaderExhaustedError from None
            self._entered = number
        loss: torch.Tensor = self._train(**given)
        if isinstance(loss, DTensor):  # the Trainer adds up and reduces local values
            loss = loss.to_local()
        if self._loader.num_micro_batches > 1:
            self._state.losses.append(loss.detach().clone())
        return loss

    # ---- as the Trainer's loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            self._begin_window()
        return self._ahead.popleft()

    def _begin_window(self) -> None:
        if self._tracked.exhausted:
            raise StopIteration  # a run that had ended with its data
        self._state.in_step, self._state.losses = True, []
        next(self._iterator)  # the boundary; it restores the losses of a window resumed in
        self._number, self._entered = 0, self._loader.num_returned - 1
        del self._state.losses[self._entered :]  # in another layout the window begins anew
        self._ahead.extend(batch for parts in self._loader.window for batch in parts)
