"""`TrainckptCallback`: saves a Trainer's training, and resumes it at the exact micro-batch.

The Trainer calls `on_train_begin` when model, optimizer and schedule exist, wrapped and on their
devices: there the Checkpointer is made and resumes. Callbacks cannot alter the loop, so a few
methods of that one Trainer are replaced until its training ends; see `transformers_hooks`. The
Trainer's own checkpoints are saved as ever, and not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from trainckpt.checkpointer import Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.accelerate_loader import missing_names, refuse_loader
from trainckpt.integrations.transformers_compat import look, refuse_trainer, trainer_of
from trainckpt.integrations.transformers_hooks import TrainedLoader, TrainerHooks, WindowReader
from trainckpt.integrations.transformers_state import TrainerPart
from trainckpt.run_directory.run_url import in_proof

if TYPE_CHECKING:
    import os


class TrainckptCallback(TrainerCallback):
    """Callback that saves a training, and resumes it when the same script runs again.

        transformers.Trainer(..., callbacks=[trainckpt.transformers.TrainckptCallback("runs/x")])

    Args:
        run: Run directory, visible to all hosts; by default that of `trainckpt run --run`.
        **options: Options (docs/options.md), and further objects to track, each under its name.

    Attributes:
        checkpointer: Checkpointer of the current training; None before it begins.

    Raises:
        ConfigurationError: This version of Transformers or Accelerate lacks a needed attribute.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **options: Any) -> None:
        look()
        gone = missing_names()
        if gone:
            raise ConfigurationError(
                f"this accelerate is built in another way than trainckpt knows ({'; '.join(gone)})",
                hint="use a version of accelerate named in docs/versions.md",
            )
        self.checkpointer: Checkpointer | None = None
        self._run = run
        self._options = options
        self._hooks: TrainerHooks | None = None
        self._part: TrainerPart | None = None  # while later callbacks begin

    @property
    def stopped(self) -> bool:
        """True if the training stopped early, saved and to be resumed (`on_stop="return"`)."""
        ckpt = self.checkpointer
        return ckpt is not None and ckpt._has_returned()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Make the Checkpointer and resume.

        Called a second time after all callbacks have begun: only then later callbacks get their
        state, since their own begin would reset it.
        """
        trainer, given = trainer_of(self)
        told = trainer.callback_handler.callbacks
        part, self._part = self._part, None
        if part is not None:
            is_this_training = part.state is trainer.state
            if is_this_training and told[-1] is not self:  # a callback has added another
                self._part = part
                told.append(self)
                return
            self._keep_first_place(told)
            if is_this_training:
                part.all_have_begun()
                return
            # else another callback raised, and this is another training
        self._must_be_over()
        refuse_trainer(self, trainer, given)
        later = [other for other in told[told.index(self) + 1 :] if other is not self]
        self._begin(trainer, later)
        if later:
            told.append(self)

    def _keep_first_place(self, told: list[Any]) -> None:
        """Remove this callback's later entries from the list."""
        for place in reversed([at for at, other in enumerate(told) if other is self][1:]):
            del told[place]

    def _begin(self, trainer: Any, later: list[Any]) -> None:
        trainer.args.output_dir = in_proof(trainer.args.output_dir)
        shard = trainer.callback_handler.train_dataloader
        refuse_loader(shard, "the training loader")
        part = TrainerPart(trainer, later)
        reader = WindowReader(shard, trainer.get_batch_samples)
        tracked: dict[str, Any] = {
            "model": trainer.model_wrapped,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": part,
        }
        if trainer.accelerator.scaler is not None:
            tracked["scaler"] = trainer.accelerator.scaler
        loader = TrainedLoader(reader)
        before = self.checkpointer
        self.checkpointer = ckpt = Checkpointer(
            self._run, loader=loader, **tracked, **self._options
        )
        for watched in (trainer, *part.stateless()):
            if watched is not self:
                ckpt._registry.watched.watch_callback(watched)
        ckpt.resume()
        self._hooks = TrainerHooks(trainer, ckpt, part, reader, ckpt.loader(loader))
        try:
            part.must_fit(ckpt.cursor, is_second=before is not None)
            self._hooks.install(later)
        except BaseException as error:
            self._hooks.abandon(error)
            raise
        self._part = part if later else None

    def _must_be_over(self) -> None:
        """Abandon a training with no reported end, as after Ctrl-C between two epochs."""
        if self._hooks is not None and self._hooks.installed:
            error = RuntimeError("its training was left, and another one began")
            self._hooks.abandon(error)
