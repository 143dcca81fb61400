"""Check Lightning, refuse set-ups without exact resume, and adapt its signals and processes.

A refusal is one sentence and its remedy. It comes from `Trainer.fit`, before any training.

Lightning's SIGTERM handler runs a collective inside the handler, and its Slurm handler saves there:
neither is installed during a run. A signal requested from Slurm ahead of the time limit is an
ordinary notice.

Lightning's launcher starts the other ranks as children of rank 0. It checks them every five
seconds, and kills all, rank 0 too, once a child has exited with a code other than 0.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.integrations.compat import calling_frames, check, check_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack


_RELIED_ON = (
    ("trainer.trainer:Trainer", "_run_stage", "is where a resume and the final snapshot belong"),
    (
        "trainer.connectors.signal_connector:_SignalConnector",
        "register_signal_handlers",
        "would take the signals away",
    ),
    ("strategies.strategy:Strategy", "process_dataloader", "is where loaders are wrapped"),
    ("trainer.connectors.data_connector", "_auto_add_worker_init_fn", "seeds the workers"),
    ("loops.fit_loop:_FitLoop", "setup_data", "makes the training loaders"),
    ("loops.evaluation_loop:_EvaluationLoop", "setup_data", "makes the validation loaders"),
    ("loops.loop:_Loop", "restarting", "must stay false"),
    ("loops.progress:_BaseProgress", "load_state_dict", "puts counters back"),
    ("callbacks.model_checkpoint:ModelCheckpoint", "file_exists", "decides how a file is named"),
    ("trainer.connectors.logger_connector.result", "_ResultMetric", "sums up what is logged"),
    ("trainer.connectors.logger_connector.result", "_Sync", "reduces what is logged"),
    ("trainer.connectors.logger_connector.result:_Metadata", "sync", "says how it is reduced"),
)
_RELIED_ON_IN_A_TRAINER = (
    ("fit_loop.epoch_progress.current.processed", "counts epochs"),
    ("fit_loop.epoch_loop.batch_progress.current.ready", "counts micro-batches"),
    ("fit_loop.epoch_loop._batches_that_stepped", "is the step that loggers see"),
    ("fit_loop.epoch_loop._results", "holds what self.log has summed up so far"),
    ("fit_loop.epoch_loop.val_loop", "validates"),
    ("fit_loop._combined_loader", "holds the training loaders"),
    ("fit_loop._data_fetcher", "fetches the batches"),
    ("_logger_connector._first_loop_iter", "is part of what loggers see"),
    ("_logger_connector._callback_metrics", "holds what callbacks and schedulers monitor"),
    ("_signal_connector", "handles signals"),
    ("num_sanity_val_steps", "is put off in a resume"),
    ("_checkpoint_connector._restore_modules_and_callbacks", "would go on from elsewhere"),
    ("_checkpoint_connector._user_managed", "says whether the script chose where to go on"),
    ("_checkpoint_connector._hpc_resume_path", "is what the Slurm plugin goes on from"),
    ("strategy.launcher", "says who started the ranks"),
)

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
LAUNCHERS = ("_SubprocessScriptLauncher", "NoneType")
_CHANGE_THE_MODEL = {
    "StochasticWeightAveraging": "use WeightAveraging or EMAWeightAveraging instead",
    "BaseFinetuning": "freeze and unfreeze with requires_grad, and give the optimizer all "
    "parameters from the start",
    "ModelPruning": "prune after training",
}


def root_of(trainer: Any) -> str:
    """Return the package of a Trainer: "lightning.pytorch" or "pytorch_lightning"."""
    for kind in type(trainer).__mro__:
        root, _, rest = kind.__module__.partition(".trainer.")
        if rest and kind.__name__ == "Trainer":
            return root
    raise ConfigurationError(
        f"{type(trainer).__qualname__} is not a Trainer of Lightning",
        hint="pass the callback to lightning.Trainer(callbacks=[...])",
    )


def part_of(trainer: Any, module: str) -> Any:
    """Return a module of the Trainer's package."""
    return importlib.import_module(f"{root_of(trainer)}.{module}")


def is_a(value: object, *names: str) -> bool:
    """Return True if a class of `value` has one of these names."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def check_lightning(trainer: Any) -> None:
    """Check every attribute relied on.

    Raises:
        ConfigurationError: This version of Lightning lacks one.
    """
    root = root_of(trainer)
    package = root.partition(".")[0]
    check(package, [(f"{root}.{owner}", name, why) for owner, name, why in _RELIED_ON])
    check_object(package, trainer, _RELIED_ON_IN_A_TRAINER)


def refuse(trainer: Any, callbacks: Sequence[Any]) -> None:
    """Refuse set-ups without an exact resume.

    Args:
        trainer: About to fit.
        callbacks: The TrainckptCallbacks among its callbacks.

    Raises:
        ConfigurationError: Names the obstacle and the remedy.
    """
    if len(callbacks) > 1:
        raise ConfigurationError(
            f"the Trainer has {len(callbacks)} TrainckptCallbacks, and a run has one place",
            hint="keep one of them",
        )
    refuse_strategy(trainer.strategy)
    for callback in trainer.callbacks:
        for name, instead in _CHANGE_THE_MODEL.items():
            if is_a(callback, name):
                raise ConfigurationError(
                    f"{type(callback).__name__} changes optimizers or parameters while it trains, "
                    "which a resume cannot make again",
                    hint=instead,
                )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigurationError(
            "reload_dataloaders_every_n_epochs makes new loaders while it trains, and their "
            "position cannot be saved",
            hint="make the loader once, and let its sampler or dataset change with set_epoch",
        )


def refuse_strategy(strategy: Any) -> None:
    """Refuse strategies with unsaved state, and unknown launchers."""
    supported = type(strategy).__name__ in STRATEGIES
    launcher = type(strategy.launcher).__name__
    if not supported or launcher not in LAUNCHERS:
        name = type(strategy).__name__ if not supported else f"the launcher {launcher}"
        raise ConfigurationError(
            f"{name} is not supported: state of its own would be lost",
            hint='use one device, strategy="ddp", or ModelParallelStrategy (FSDP2)',
        )


def chose_path_itself(trainer: Any, path: Any) -> bool:
    """Return True if Lightning itself found this path to resume from.

    It does with OnExceptionCheckpoint among the callbacks, as if `ckpt_path="last"` was passed. The
    argument as passed is only in the frame of `fit`. A file of Lightning's Slurm plugin does not
    count: it comes from training without trainckpt.
    """
    connector = trainer._checkpoint_connector
    if path is None or connector._user_managed or path == connector._hpc_resume_path:
        return False
    for frame in calling_frames():
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is trainer:
            return "ckpt_path" in frame.f_locals and frame.f_locals["ckpt_path"] is None
    return False


def refuse_path(path: Any) -> None:
    """Refuse `fit(ckpt_path=...)`, and files found by Lightning's Slurm plugin."""
    if path is not None:
        raise ConfigurationError(
            f"ckpt_path={str(path)!r} and TrainckptCallback both say where to go on",
            hint="leave ckpt_path out (or move an hpc_ckpt_*.ckpt away): the same script goes on "
            "by itself. To begin a new run from that file's weights, load them before fit",
        )


def refuse_fetcher(trainer: Any) -> None:
    """Refuse loops with batches fetched ahead, or fetched by the script."""
    fetcher = trainer.fit_loop._data_fetcher
    if is_a(fetcher, "_DataLoaderIterDataFetcher"):
        raise ConfigurationError(
            "training_step(dataloader_iter) fetches by itself, so trainckpt cannot see where a "
            "micro-batch ends",
            hint="take the batch as an argument: training_step(self, batch, batch_idx)",
        )
    loaders = trainer.fit_loop._combined_loader
    if loaders._mode == "max_size" and len(loaders.flattened) > 1:
        raise ConfigurationError(
            'CombinedLoader(mode="max_size") goes on with loaders that have ended',
            hint='use mode="max_size_cycle" or "min_size"',
        )
    if fetcher.length is None:
        raise ConfigurationError(
            "the training loader has no length, so Lightning fetches one batch ahead of training",
            hint="give its dataset a __len__, or say limit_train_batches=<batches an epoch>",
        )


LINGER_S = 4.0  # below the time limit of a stopped process
LOOK_S = 0.02


def take_over_requeue(trainer: Any, undo: ExitStack) -> None:
    """Catch the requeue signal of Lightning's Slurm plugin, and raise SIGUSR1 instead."""
    environment = trainer._accelerator_connector.cluster_environment
    wanted = getattr(environment, "requeue_signal", None)
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    on_main = threading.current_thread() is threading.main_thread()
    if wanted is None or wanted in heard or not on_main:
        return
    undo.callback(signal.signal, wanted, signal.getsignal(wanted))
    signal.signal(wanted, lambda *_: signal.raise_signal(signal.SIGUSR1))


def leave_together(trainer: Any) -> None:
    """Exit in order after a stop and its commit.

    Rank 0 no longer kills all ranks at a child's exit. Children wait up to `LINGER_S` for its exit.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not is_a(environment, "LightningEnvironment") or trainer.world_size == 1:
        return
    if trainer.local_rank == 0:
        for thread in threading.enumerate():
            if is_a(thread, "_ChildProcessObserver"):
                thread._terminate_all = lambda: None  # type: ignore[attr-defined]
        return
    parent, until_s = os.getppid(), time.monotonic() + LINGER_S
    while os.getppid() == parent and time.monotonic() < until_s:
        time.sleep(LOOK_S)
