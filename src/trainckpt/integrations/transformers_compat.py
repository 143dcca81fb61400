"""Check Transformers, refuse set-ups without exact resume, and find the callback's Trainer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.integrations.accelerate_attach import refuse_accelerator
from trainckpt.integrations.compat import RequiredAttribute, check

if TYPE_CHECKING:
    from types import FrameType

_TRAINER = "transformers:Trainer"
RELIED = (
    RequiredAttribute(_TRAINER, "_inner_training_loop", "runs the epochs"),
    RequiredAttribute(_TRAINER, "_run_epoch", "runs one epoch, also from its middle"),
    RequiredAttribute(_TRAINER, "get_batch_samples", "fetches a window"),
    RequiredAttribute(_TRAINER, "_load_rng_state", "would put other random generators back"),
    RequiredAttribute(_TRAINER, "_finalize_training", "ends a training"),
    RequiredAttribute("transformers.trainer", "skip_first_batches", "would skip batches again"),
    RequiredAttribute(
        "transformers.trainer_callback:CallbackHandler", "on_epoch_begin", "tells of an epoch"
    ),
    RequiredAttribute(
        "transformers.trainer_callback:ExportableState", "state", "says a callback's state"
    ),
)
# (method, names its code must use)
_USED = (
    ("_inner_training_loop", ("_run_epoch", "_finalize_training", "_tr_loss", "on_epoch_begin")),
    ("_inner_training_loop", ("_total_loss_scalar", "_globalstep_last_logged")),
    ("_run_epoch", ("get_batch_samples", "skip_first_batches", "_load_rng_state", "enumerate")),
    ("_run_epoch", ("current_gradient_accumulation_steps", "_set_sync_gradients")),
)
_GIVEN = {
    "epoch",
    "train_dataloader",
    "resume_from_checkpoint",
    "epochs_trained",
    "steps_trained_in_current_epoch",
}


def look() -> None:
    """Raise `ConfigurationError` if this Transformers is built in another way."""
    check("transformers", RELIED)
    import transformers

    gone = []
    for method, names in _USED:
        code = getattr(transformers.Trainer, method).__code__
        gone += [f"{method}: {name}" for name in names if name not in code.co_names]
    code = transformers.Trainer._run_epoch.__code__
    gone += [f"_run_epoch({name})" for name in sorted(_GIVEN - set(code.co_varnames))]
    if gone:
        raise ConfigurationError(
            f"transformers {transformers.__version__} is built in another way than trainckpt "
            f"knows ({'; '.join(gone)})",
            hint="use a version of transformers named in docs/versions.md",
        )


def trainer_of(callback: Any) -> tuple[Any, dict[str, Any]]:
    """Return the Trainer at the start of its training, and the locals of its loop.

    Callbacks do not get their Trainer: it is found among the calling frames.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_inner_training_loop" and "_run_epoch" in frame.f_code.co_names:
            trainer = frame.f_locals.get("self")
            handler = getattr(trainer, "callback_handler", None)
            if any(one is callback for one in getattr(handler, "callbacks", ())):
                return trainer, frame.f_locals
        frame = frame.f_back
    raise ConfigurationError(
        "no transformers.Trainer is training here, or one with a training loop of its own",
        hint="pass the callback to transformers.Trainer(callbacks=[...]); for loops of your own, "
        "use trainckpt.Checkpointer",
    )


def refuse_trainer(callback: Any, trainer: Any, given: dict[str, Any]) -> None:
    """Raise `ConfigurationError` for set-ups without exact resume; one sentence and a remedy."""
    args, inner = trainer.args, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, type(callback))]
    refusals = (
        (
            len(ours) > 1,
            (f"this Trainer has {len(ours)} TrainckptCallbacks, and each run is saved once"),
            "leave one of them",
        ),
        (
            given.get("resume_from_checkpoint") is not None,
            "resume_from_checkpoint and TrainckptCallback would each resume this training",
            "call trainer.train() without it: the callback resumes by itself",
        ),
        (
            given.get("trial") is not None,
            ("a search for hyperparameters trains many times, and a run is one training"),
            "leave the callback out of the search",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True begins again with other batches",
            "set per_device_train_batch_size",
        ),
        (
            args.ignore_data_skip,
            ("ignore_data_skip=True asks for a resume at another place in the data"),
            "leave ignore_data_skip=False",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            (
                "enable_jit_checkpoint=True also acts on "
                "SIGTERM, and would save in the middle of a micro-batch"
            ),
            "leave it out: the callback saves at the signal",
        ),
        (
            args.dataloader_persistent_workers
            and args.dataloader_num_workers > 0
            and args.eval_strategy != "no",
            (
                "dataloader_persistent_workers=True also keeps the workers of evaluations, whose "
                "randomness nobody can put back"
            ),
            "leave dataloader_persistent_workers=False, or eval_strategy='no'",
        ),
        (
            type(inner).__name__ == "LayerWiseDummyOptimizer",
            (
                "a layerwise optimizer has its "
                "state in a hook of each parameter, where nobody sees it"
            ),
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
