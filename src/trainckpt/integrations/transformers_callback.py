"""`TrainckptCallback`: saves a Trainer's training, and resumes it at the exact micro-batch.

The Trainer calls `on_train_begin` when model, optimizer and schedule exist, wrapped and on their
devices: there the Checkpointer is made and resumes. Callbacks cannot alter the loop, so a few
methods of that one Trainer are replaced until its training ends; see `transformers_hooks`. The
Trainer's own checkpoints are saved as ever, and not used. Set-ups without exact resume are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import refuse_taken_names
from trainckpt.checkpointer import Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.accelerate_attach import refuse_accelerator
from trainckpt.integrations.accelerate_loader import check_loaders, refuse_loader
from trainckpt.integrations.compat import calling_frames, check, check_code
from trainckpt.integrations.transformers_hooks import TrainedLoader, TrainerHooks, WindowReader
from trainckpt.integrations.transformers_state import TrainerPart
from trainckpt.run_directory.run_url import in_proof

if TYPE_CHECKING:
    import os


_TRAINER = "transformers:Trainer"
_RELIED = (
    (_TRAINER, "_inner_training_loop", "runs the epochs"),
    (_TRAINER, "_run_epoch", "runs one epoch, also from its middle"),
    (_TRAINER, "get_batch_samples", "fetches a window"),
    (_TRAINER, "_load_rng_state", "would restore other random generators"),
    (_TRAINER, "_finalize_training", "ends a training"),
    ("transformers.trainer", "skip_first_batches", "would skip batches again"),
    ("transformers.trainer_callback:CallbackHandler", "on_epoch_begin", "reports an epoch"),
    ("transformers.trainer_callback:ExportableState", "state", "has a callback's state"),
)
_LOOP, _EPOCH = f"{_TRAINER}._inner_training_loop", f"{_TRAINER}._run_epoch"
_USED = (
    (_LOOP, ("_run_epoch", "_finalize_training", "_tr_loss", "on_epoch_begin")),
    (_LOOP, ("_total_loss_scalar", "_globalstep_last_logged")),
    (_EPOCH, ("get_batch_samples", "skip_first_batches", "_load_rng_state", "enumerate")),
    (_EPOCH, ("current_gradient_accumulation_steps", "_set_sync_gradients")),
    (_EPOCH, ("epoch=", "train_dataloader=", "resume_from_checkpoint=")),
    (_EPOCH, ("epochs_trained=", "steps_trained_in_current_epoch=")),
)


def trainer_of(callback: Any) -> tuple[Any, dict[str, Any]]:
    """Return the Trainer at the start of its training, and the locals of its loop.

    Callbacks do not get their Trainer: it is found among the calling frames.
    """
    for frame in calling_frames():
        if frame.f_code.co_name == "_inner_training_loop" and "_run_epoch" in frame.f_code.co_names:
            trainer = frame.f_locals.get("self")
            handler = getattr(trainer, "callback_handler", None)
            if any(one is callback for one in getattr(handler, "callbacks", ())):
                return trainer, frame.f_locals
    raise ConfigurationError(
        "no transformers.Trainer is training here, or one with a training loop of its own",
        hint="pass the callback to transformers.Trainer(callbacks=[...]); for loops of your own, "
        "use trainckpt.Checkpointer",
    )


def refuse_trainer(callback: Any, trainer: Any, given: dict[str, Any]) -> None:
    """Raise `ConfigurationError` for set-ups without exact resume; one sentence and a remedy."""
    args, inner = trainer.args, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, type(callback))]
    keeps_workers = args.dataloader_persistent_workers and args.dataloader_num_workers > 0
    refusals = (
        (
            len(ours) > 1,
            f"this Trainer has {len(ours)} TrainckptCallbacks, and each run is saved once",
            "leave one of them",
        ),
        (
            given.get("resume_from_checkpoint") is not None,
            "resume_from_checkpoint and TrainckptCallback would each resume this training",
            "call trainer.train() without it: the callback resumes by itself",
        ),
        (
            given.get("trial") is not None,
            "a search for hyperparameters trains many times, and a run is one training",
            "leave the callback out of the search",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True begins again with other batches",
            "set per_device_train_batch_size",
        ),
        (
            args.ignore_data_skip,
            "ignore_data_skip=True asks for a resume at another place in the data",
            "leave ignore_data_skip=False",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "enable_jit_checkpoint=True also acts on SIGTERM, and would save inside a micro-batch",
            "leave it out: the callback saves at the signal",
        ),
        (
            keeps_workers and args.eval_strategy != "no",
            "dataloader_persistent_workers=True keeps the workers of evaluations and their state",
            "leave dataloader_persistent_workers=False, or eval_strategy='no'",
        ),
        (
            type(inner).__name__ == "LayerWiseDummyOptimizer",
            "a layerwise optimizer has its state in hooks of parameters, out of trainckpt's sight",
            "use the same optim without '_layerwise'",
        ),
        (
            args.n_gpu > 1,
            "one process trains on several GPUs by DataParallel",
            "start it with torchrun, one process for each GPU",
        ),
    )
    for refused, why, instead in refusals:
        if refused:
            raise ConfigurationError(why, hint=instead)
    refuse_accelerator(trainer.accelerator)


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
        check("transformers", _RELIED)
        check_code("transformers", _USED)
        check_loaders()
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
            for place in [at for at, other in enumerate(told) if other is self][:0:-1]:
                del told[place]  # this callback's later entries
            if is_this_training:
                part.all_have_begun()
                self._track_reports(trainer)
                return
            # else another callback raised, and this is another training
        if self._hooks is not None and self._hooks.installed:  # as after Ctrl-C between two epochs
            self._hooks.abandon(RuntimeError("its training was left, and another one began"))
        refuse_trainer(self, trainer, given)
        later = [other for other in told[told.index(self) + 1 :] if other is not self]
        self._begin(trainer, later)
        if later:
            told.append(self)
        else:
            self._track_reports(trainer)

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
        refuse_taken_names([*tracked, "loader"], self._options)
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

    def _track_reports(self, trainer: Any) -> None:
        """Track what the callbacks report to; all have begun."""
        assert self.checkpointer is not None
        for one in trainer.callback_handler.callbacks if trainer.is_world_process_zero() else ():
            run = getattr(one, "tb_writer", None)
            if (mlflow := getattr(one, "_ml_flow", None)) is not None:
                run = mlflow.active_run()
            elif (wandb := getattr(one, "_wandb", None)) is not None:
                run = wandb.run if wandb.run and not wandb.run.disabled else None
            try:
                if run is not None:
                    self.checkpointer.track_run(run)
            except ConfigurationError as error:
                logger.warning("%s repeats steps after a resume: %s", type(one).__name__, error)
