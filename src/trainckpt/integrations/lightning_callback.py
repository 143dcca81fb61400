"""The callback for Lightning's Trainer: resumes a fit, with the boundary inside its loaders.

        setup              checks Lightning, refuses set-ups without exact resume, suppresses
                           Lightning's signal handlers, and wraps the Trainer's stage
    the stage begins   model, optimizers and process group exist: resume. The training loaders are
                       made and tracked; the first one's fetch is the boundary
    first boundary     everything is restored once more: earlier steps (zeroed gradients, hooks,
                       validation at the start) have changed nothing
    the stage ends     close: the final snapshot

A stop thus happens at the fetch of the next batch, after all work of the last one: validation,
epoch ends and other callbacks included.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import log
from trainckpt.attempt.launch import AT_VARIABLE
from trainckpt.attempt.log import logger
from trainckpt.checkpointer import Checkpointer
from trainckpt.errors import ConfigurationError, StateMismatch, Stopped, TrainckptError
from trainckpt.integrations import lightning_compat, lightning_loggers
from trainckpt.integrations.compat import one_or_all, replace_attribute
from trainckpt.integrations.lightning_compat import (
    check_lightning,
    chose_path_itself,
    is_a,
    part_of,
    refuse,
    refuse_fetcher,
    refuse_path,
)
from trainckpt.integrations.lightning_state import HookState, LoopState, modules_of
from trainckpt.run_directory.run_url import in_proof
from trainckpt.snapshot import attempt_history
from trainckpt.state.adapters.stateful import MetricState

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor


# ---- ModelCheckpoint's files that are newer than the snapshot
#
# Their training is repeated, and so are the files: under the same names, as in an uninterrupted
# run. Lightning would give a file another name if one exists, `last-v1.ckpt`, and the older file
# would stay for good.
#
#     before a write   rank 0 adds the name to the attempt's record, with the micro-batches a
#                      snapshot needs to cover the file
#     after a resume   names not covered by the snapshot may be overwritten
#     at the end       files not written again are reported; nothing is ever deleted here
#
# An attempt inherits the names of the previous one, unless it was directed to another snapshot than
# the newest: the files of a branch left on purpose stay.


FACT, NAMES = "lightning", "checkpoint_files"
MOST = 200  # newest names in a record; each new name rewrites the record


def redirect_in_proof(trainer: Any) -> None:
    """Give each run of a proof its own folders: else file names would differ between them."""
    for callback in trainer.callbacks:
        if is_a(callback, "ModelCheckpoint") and callback.dirpath:
            callback.dirpath = in_proof(str(callback.dirpath))


class CheckpointFiles:
    """The files of all ModelCheckpoints of a fit.

    Args:
        trainer: The Trainer.
        ckpt: The Checkpointer of the fit, resumed.
    """

    def __init__(self, trainer: Any, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt
        self._callbacks = [c for c in trainer.callbacks if is_a(c, "ModelCheckpoint")]
        self._is_first = bool(trainer.is_global_zero)
        self._names: dict[str, int] = {}
        known = ckpt.cursor.micro_batches
        if self._is_first and self._callbacks:
            self._names = _names_before(ckpt)
        unknown = [name for name, at in self._names.items() if at > known]
        # All ranks must decide alike on a name: Lightning agrees on it in a collective.
        self._again = set(trainer.strategy.broadcast(unknown) if self._callbacks else ())

    def watch(self, undo: ExitStack) -> None:
        """Replace `file_exists` of each ModelCheckpoint."""
        for callback in self._callbacks:
            exists = partial(self._exists, callback.file_exists)
            replace_attribute(undo, callback, "file_exists", exists)
        if self._is_first and self._callbacks:
            self._record()  # even if empty: names of an abandoned branch end here

    def say_left(self) -> None:
        """Report files of earlier attempts not written again, at the end of the fit."""
        for name in sorted(self._again) if self._is_first else ():
            if Path(name).exists():
                logger.warning(
                    "%s is of an interrupted attempt, and was not written again: it does not "
                    "belong to the trained run",
                    name,
                )

    def _exists(self, ask: Callable[[Any, Any], bool], path: Any, trainer: Any) -> bool:
        name = _absolute(path)
        if name in self._again:
            self._again.discard(name)
        elif ask(path, trainer):
            return True
        if self._is_first:  # it is written next
            self._names.pop(name, None)
            self._names[name] = self._ckpt.cursor.micro_batches + 1
            self._record()
        return False

    def _record(self) -> None:
        assert self._ckpt._attempt is not None
        for name in list(self._names)[:-MOST]:
            del self._names[name]
        self._ckpt._attempt.record_writer.set_fact(FACT, NAMES, dict(self._names))


def _names_before(ckpt: Checkpointer) -> dict[str, int]:
    """Return the names in the record of the newest attempt before this one."""
    if ckpt.options.resume == "never" or os.environ.get(AT_VARIABLE):
        return {}
    assert ckpt._attempt is not None
    try:
        records = attempt_history.read_attempts(ckpt._tier)
    except TrainckptError as error:
        logger.warning("files of earlier attempts are not known: %s", error.message)
        return {}
    for number in sorted(records, reverse=True):
        told = records[number].facts.get(FACT)
        if number < ckpt.attempt and isinstance(told, dict) and NAMES in told:
            return {str(name): int(at) for name, at in dict(told[NAMES]).items()}
    return {}


def _absolute(path: Any) -> str:
    name = str(path)
    return name if "://" in name else str(Path(name).absolute())


# ---- the callback


def _base() -> type[Any]:
    """Return a class accepted as a callback by every Trainer loaded here."""
    package = sys.modules.get("pytorch_lightning")
    if package is None:
        from lightning.pytorch import Callback

        return Callback
    kind: type[Any] = package.Callback
    other = sys.modules.get("lightning.pytorch")
    return kind if other is None else type("Callback", (other.Callback, kind), {})


LOADER_HINT = "use a torch DataLoader, or a loader with state_dict and load_state_dict"


class _StopRequested(BaseException):
    """Stopped, with on_stop="return": leaves the loops, and is caught in this file."""


class TrainerCheckpointer(Checkpointer):
    """Checkpointer of a Trainer's own objects, whose names may be those of options: `metrics`."""

    def __init__(self, run: Any, tracked: dict[str, Any], options: dict[str, Any]) -> None:
        self._tracked = tracked
        super().__init__(run, **options)

    def _trainer_objects(self) -> dict[str, Any]:
        return self._tracked


class TrainckptCallback(_base()):  # type: ignore[misc]
    """Callback that saves a fit, and resumes it when the same script runs again.

        lightning.Trainer(callbacks=[trainckpt.lightning.TrainckptCallback("runs/x")])

    Args:
        run: Run directory, visible to all hosts; by default that of `trainckpt run --run`.
        **options: Options (docs/options.md), and further objects to track, each under its name.

    Raises:
        ConfigurationError: From `Trainer.fit`, if the set-up cannot resume exactly; the message
            has the change to make.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self._run, self._options = run, options
        self._ckpt: Checkpointer | None = None
        self._used = False
        self._knows_fetcher = self._trains = False
        self._training: list[Any] = []
        self._validating: list[TrackedLoader] = []
        self._undo = ExitStack()
        self._hooks: HookState

    @property
    def checkpointer(self) -> Checkpointer:
        """Checkpointer of the running fit, for `save`, `track_file` and the like."""
        if self._ckpt is None:
            raise ConfigurationError(
                "there is no Checkpointer yet",
                hint="ask for it while Trainer.fit runs, in on_train_start or later",
            )
        return self._ckpt

    @property
    def cursor(self) -> Cursor:
        """Position of the run; in a hook, that of the micro-batch being trained."""
        return self.checkpointer.cursor

    # ---- Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Refuse inexact set-ups, and wrap the stage. Does nothing except for a fit."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        if self._used:
            raise ConfigurationError(
                "this TrainckptCallback was in a fit before, and a run has one fit",
                hint="make a new Trainer with a new TrainckptCallback, in another place",
            )
        self._undo.close()  # left by a fit ended right here, or by a tuner's
        log.prepare()  # uncaught refusals end the script with their own exit code from here on
        check_lightning(trainer)
        refuse(trainer, [c for c in trainer.callbacks if isinstance(c, TrainckptCallback)])
        lightning_loggers.keep_versions(trainer, self._run, self._options)
        replace, connector = partial(replace_attribute, self._undo), trainer._checkpoint_connector
        replace(trainer._signal_connector, "register_signal_handlers", lambda *_: None)
        restore = partial(_restore_from_nowhere, trainer, connector._restore_modules_and_callbacks)
        replace(connector, "_restore_modules_and_callbacks", restore)
        replace(trainer, "_run_stage", partial(self._around, trainer, trainer._run_stage))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Make the validation loaders now: later ones would be too late for tracking."""
        if self._ckpt is not None:
            self._make_validation_loaders(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Enter the epoch: Lightning leaves a pass at its last batch, with no further request."""
        if self._ckpt is not None:
            self._enter_epoch(trainer.current_epoch)

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the validation pass."""
        self._leave_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the validation pass, complete or limited."""
        self._leave_validation()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Prevent saves by checkpoint callbacks, called after this one.

        After a stop everything is saved. A refusal before any training must not overwrite the files
        of an attempt with training.
        """
        is_refusal = isinstance(exception, TrainckptError) and not self._trains
        if is_refusal or isinstance(exception, Stopped):
            for callback in trainer.callbacks:
                if is_a(callback, "Checkpoint"):
                    _pass_over_exception(callback)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Restore the Trainer's attributes."""
        self._undo.close()

    # ---- the stage

    def _around(self, trainer: Any, stage: Callable[[], Any]) -> Any:
        self._used = True
        redirect_in_proof(trainer)
        with self._undo:
            self._ckpt = ckpt = TrainerCheckpointer(
                self._run, self._tracked(trainer), self._options
            )
            for callback in self._hooks.stateless():
                ckpt._registry.watched.watch_callback(callback)
            lightning_compat.take_over_requeue(trainer, self._undo)
            ckpt._position.manage_epochs()
            try:
                with ckpt:
                    lightning_loggers.track(trainer, ckpt)
                    self._make_loaders(trainer, ckpt)
                    files = CheckpointFiles(trainer, ckpt)
                    files.watch(self._undo)
                    found = stage()
                    self._enter_epoch(trainer.current_epoch)
                    files.say_left()
                    return found
            except _StopRequested:
                return None
            except Stopped:
                lightning_compat.leave_together(trainer)
                raise
            finally:
                for _, loader in ckpt._loaders:
                    loader.shutdown()

    def _tracked(self, trainer: Any) -> dict[str, Any]:
        """Return the Trainer's objects to track, by name."""
        module, strategy = trainer.lightning_module, trainer.strategy
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        beside = modules_of(trainer)
        self._hooks = HookState(trainer, self, beside)
        found: dict[str, Any] = {
            "model": strategy.model,
            "optimizer": one_or_all(trainer.optimizers),
            "scheduler": one_or_all([c.scheduler for c in trainer.lr_scheduler_configs]),
            "metrics": MetricState(lambda: {"": module, **modules_of(trainer)}),
            "hooks": self._hooks,
            "trainer": LoopState(trainer),
            **beside,
        }
        if scaler is not None:
            found["scaler"] = scaler
        mesh = getattr(strategy, "_device_mesh", None)
        if mesh is not None:
            found.update(mesh=mesh, data_dims=("data_parallel",))
        return found

    def _make_loaders(self, trainer: Any, ckpt: Checkpointer) -> None:
        wrap = partial(self._wrap, trainer, ckpt, trainer.strategy.process_dataloader)
        replace_attribute(self._undo, trainer.strategy, "process_dataloader", wrap)
        fit = trainer.fit_loop
        if fit._combined_loader is not None:  # made for estimated_stepping_batches
            fit._combined_loader.reset()
            fit._combined_loader = None
        fit.setup_data()
        if ckpt.resumed_from is not None:
            # Validation at the start would change nothing, and may take long.
            replace_attribute(self._undo, trainer, "num_sanity_val_steps", 0)
            self._make_validation_loaders(trainer)

    def _make_validation_loaders(self, trainer: Any) -> None:
        if trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True

    def _wrap(
        self, trainer: Any, ckpt: Checkpointer, process: Callable[[Any], Any], loader: Any
    ) -> Any:
        loader = process(loader)
        data = part_of(trainer, "trainer.connectors.data_connector")
        # Lightning would ask the wrapper
        data._auto_add_worker_init_fn(loader, trainer.global_rank)
        if trainer.training:
            return self._wrap_for_training(trainer, ckpt, loader)
        if any(loader is one for one in self._training):
            return loader
        try:
            tracked = ckpt.loader(loader)
        except ConfigurationError:  # untracked: it begins anew with each validation
            return loader
        self._validating.append(tracked)
        return tracked

    def _wrap_for_training(self, trainer: Any, ckpt: Checkpointer, loader: Any) -> TrackedLoader:
        try:
            tracked = ckpt.loader(loader)
        except StateMismatch:  # the loader is supported, but differs from the snapshot's
            raise
        except ConfigurationError as error:
            raise ConfigurationError(error.message, hint=LOADER_HINT) from error
        if tracked.on_boundary is not None and not self._training:
            tracked.on_boundary = partial(self._at_boundary, trainer, tracked.on_boundary)
        self._training.append(loader)
        return tracked

    def _at_boundary(self, trainer: Any, boundary: Callable[[], None]) -> None:
        if not self._knows_fetcher:
            refuse_fetcher(trainer)
            self._knows_fetcher = self._hooks.begun = True
        try:
            boundary()
        except StopIteration:
            raise _StopRequested from None
        self._trains = True

    def _enter_epoch(self, epoch: int) -> None:
        position = self.checkpointer._position
        if position.cursor.epoch != epoch:
            position.enter_epoch(epoch)

    def _leave_validation(self) -> None:
        for loader in self._validating:
            loader.abandon_pass()


def _restore_from_nowhere(
    trainer: Any, restore: Callable[..., None], path: Any = None, *more: Any
) -> None:
    if chose_path_itself(trainer, path):
        log.logger.info(
            "%s is not loaded: Lightning chose it by itself, and the run goes on from its own "
            "snapshots",
            path,
        )
    else:
        refuse_path(path)
    restore(None, *more)


def _pass_over_exception(callback: Any) -> None:
    """Disable the callback's on_exception once: Lightning calls it right after this one."""
    before = vars(callback).get("on_exception")

    def pass_over(*_: Any) -> None:
        del callback.on_exception
        if before is not None:
            callback.on_exception = before

    callback.on_exception = pass_over
