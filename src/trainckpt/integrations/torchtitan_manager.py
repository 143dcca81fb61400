"""`TorchtitanManager`: torchtitan's checkpoint manager, with snapshots by trainckpt.

torchtitan builds the manager that `config.checkpoint` names, calls `load` as training begins and
`save` after each step, and `close` at the end. Saves and stops do not wait for `save`: they fall on
the boundaries that `torchtitan_hooks` sets, before each micro-batch.

Some keys ask for files in torchtitan's own formats: the checkpoint that a run begins with, and the
weights that a finished run leaves. torchtitan's own DCP manager reads and writes those.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as DcpManager
from torchtitan.config.override import derive
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from trainckpt.attempt.launch import AT_VARIABLE
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import TABLE
from trainckpt.checkpointer import Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import STARTING
from trainckpt.format.cursor import Cursor
from trainckpt.format.names import ATTEMPTS
from trainckpt.integrations.compat import check, check_code, one_or_all
from trainckpt.integrations.torchtitan_data import WindowLoader
from trainckpt.integrations.torchtitan_hooks import TorchtitanHooks, TrainState
from trainckpt.run_directory.run_url import in_proof
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.storage.base import Tier

_TRAINER = "torchtitan.trainer:Trainer"
_RELIED = (
    (_TRAINER, "batch_generator", "reads the batches"),
    (_TRAINER, "forward_backward_step", "trains a micro-batch"),
    (_TRAINER, "train_step", "trains a window"),
    ("torchtitan.components.dataloader", "DataloaderExhaustedError", "ends a training"),
    ("torchtitan.components.checkpointer.base", "ModelWrapper", "flattens a model"),
)
_USED = (
    (f"{_TRAINER}.train", ("load", "batch_generator", "train_step", "save", "step")),
    (
        f"{_TRAINER}.train_step",
        ("zero_grad", "next", "forward_backward_step", "gradient_accumulation_steps"),
    ),
    (f"{_TRAINER}.batch_generator", ("iter", "next", "DataloaderExhaustedError")),
)
KEEP_ALL = 10**6
FACT, LOAD_STEP = "torchtitan", "load_step"  # in the record of an attempt
_CHECKPOINT = re.compile(r"step-(\d+)")


class TorchtitanManager(BaseCheckpointManager):  # type: ignore[misc]
    """Save a torchtitan run, and resume it at the exact micro-batch when it starts again.

    torchtitan makes it, from a `Config`; its arguments are those of every manager of torchtitan.

    Attributes:
        checkpointer: Checkpointer of the training; None before it begins, and once it is closed.

    Raises:
        ConfigurationError: A key of `[checkpoint]` asks for something else, or this version of
            torchtitan is built in another way; the message says what to do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Keys of `[checkpoint]` (docs/torchtitan.md), and options of trainckpt."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Accepted, and the same in each mode: training goes on while a snapshot is written."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of docs/options.md, such as {"every": "10 min"}."""

    def __init__(self, config: Config, **objects: Any) -> None:
        self.enable, self.save_future = config.enable, None
        self.checkpointer: Checkpointer | None = None
        if not self.enable:
            return
        check("torchtitan", _RELIED)
        check_code("torchtitan", _USED)
        refuse_config(config)
        base = in_proof(objects["base_folder"])
        self._config, self._objects = config, {**objects, "base_folder": base}
        self._trainer = objects["states"]["train_state"]
        refuse_trainer(self._trainer)
        self._folder = filesystem.join(base, config.folder)
        self._hooks: TorchtitanHooks | None = None
        self._state: TrainState | None = None

    # ---- called by torchtitan, where checkpoints are enabled

    def _load(self, step: int = -1) -> bool:
        """Make the Checkpointer and resume; return True if the run does not begin anew."""
        if self.checkpointer is not None:
            raise ConfigurationError(
                "this manager's training has begun already, and each run is saved once",
                hint="call trainer.train() once",
            )
        self._must_not_begin_beside_checkpoints()
        trainer, objects = self._trainer, self._objects
        num_parts = trainer.num_pipeline_parallel_microbatches
        loader = WindowLoader(trainer.dataloader, trainer.gradient_accumulation_steps, num_parts)
        self._state = state = TrainState(trainer, loader)
        others = {name: one for name, one in objects["states"].items() if one is not trainer}
        ckpt = Checkpointer(
            self._folder,
            loader=loader,
            model=one_or_all(list(objects["model_parts"])),
            optimizer=one_or_all(list(objects["optimizers"])),
            lr_scheduler=one_or_all(list(objects["lr_schedulers"])),
            train_state=state,
            **others,
            **data_world(trainer),
            **options_of(self._config),
        )
        with _starting_at(step, ckpt._tier):
            ckpt.resume()
        assert ckpt._attempt is not None
        if step >= 0:
            ckpt._attempt.record_writer.set_facts({FACT: {LOAD_STEP: step}})
        self.checkpointer = ckpt
        self._hooks = TorchtitanHooks(trainer, ckpt, state, loader)
        try:
            if ckpt.resumed_from is None:
                self._load_initial(ckpt)
            state.must_fit(ckpt.cursor.micro)
        except BaseException as error:
            self._end(error)
            raise
        self._hooks.install()
        return ckpt.resumed_from is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Take note that a step is over; write the weights that a finished run leaves."""
        ckpt, state = self.checkpointer, self._state
        if ckpt is None or state is None:
            raise ConfigurationError(
                f"step {curr_step} is saved before the training has begun",
                hint="train by trainer.train(), which calls load() first",
            )
        state.in_step = False
        if curr_step == 1 and self._config.enable_first_step_checkpoint:
            ckpt.save()
        if last_step and self._config.last_save_model_only:
            self._dcp().save(curr_step, last_step=True)
            return True
        return False

    def _close(self) -> None:
        """Finish the run, or end the attempt by the error that is being handled."""
        self._end(sys.exc_info()[1])

    def _wait_for_saving(self) -> None:
        """Return at once: nothing of torchtitan's waits for a save."""

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: the optimizers wait by themselves, in hooks of their steps."""

    # ---- the beginning and the end

    def _end(self, error: BaseException | None) -> None:
        ckpt, self.checkpointer = self.checkpointer, None
        if ckpt is None:
            return
        if error is None:
            self._trainer.optimizers.zero_grad()  # as the next step would: no snapshot needs them
            ckpt.close()
        else:
            ckpt.__exit__(type(error), error, None)
        if self._hooks is not None:
            self._hooks.remove()

    def _must_not_begin_beside_checkpoints(self) -> None:
        """Refuse a folder with torchtitan's own checkpoints and no run."""
        if _is_run(self._folder):
            return
        names = filesystem.listdir(self._folder) if filesystem.isdir(self._folder) else []
        steps = [int(found[1]) for found in map(_CHECKPOINT.fullmatch, names) if found]
        if steps:
            newest = filesystem.join(self._folder, f"step-{max(steps)}")
            if not filesystem.is_remote(newest):
                newest = str(Path(newest).absolute())
            raise ConfigurationError(
                f"{self._folder} has checkpoints of torchtitan's own manager, the newest "
                f"step-{max(steps)}, and no run of trainckpt: it would begin anew beside them",
                hint=f"to go on from one, set initial_load_path={newest} (an earlier, if it has "
                "weights alone), initial_load_model_only=False and another checkpoint.folder",
            )

    def _load_initial(self, ckpt: Checkpointer) -> None:
        """Begin with the checkpoint of `initial_load_path`, which torchtitan reads."""
        config = self._config
        if not (config.initial_load_path or config.initial_load_in_hf) or ckpt.options.init_from:
            return
        self._dcp().load()
        if self._trainer.step:  # a whole checkpoint: the run counts on from its step
            ckpt._position.restore(Cursor(step=self._trainer.step))

    def _dcp(self) -> Any:
        """Return torchtitan's own manager, for files in its formats."""
        config = derive(self._config, DcpManager.Config, keep_latest_k=0, async_mode="disabled")
        objects = {**self._objects, "states": dict(self._objects["states"])}
        return DcpManager(config, **objects)


@contextmanager
def _starting_at(step: int, tier: Tier) -> Iterator[None]:
    """Let a resume choose the snapshot after this step, once; -1: the newest.

    The key stays in the configuration of later starts, which must not lose what the first trained.
    """
    if step < 0 or os.environ.get(AT_VARIABLE):
        yield
        return
    records = attempt_history.read_attempts(tier)
    trained = [number for number in sorted(records) if records[number].state != STARTING]
    told = records[trained[-1]].facts.get(FACT) if trained else None
    if isinstance(told, dict) and told.get(LOAD_STEP) == step:
        logger.info("load_step=%d: attempt %d has begun there, and is continued", step, trained[-1])
        yield
        return
    os.environ[AT_VARIABLE] = f"s{step}"
    try:
        yield
    finally:
        del os.environ[AT_VARIABLE]


# ---- the keys of [checkpoint]


def options_of(config: Any) -> dict[str, Any]:
    """Return the options of a Checkpointer for this configuration."""
    options = {
        "every": f"{config.interval} steps",
        "keep_last": config.keep_latest_k or KEEP_ALL,
        **config.options,
    }
    if config.initial_load_path and _is_run(config.initial_load_path):
        options["init_from"] = config.initial_load_path
    return options


def _is_run(path: str) -> bool:
    """Return True for `RUN` or `RUN@SNAPSHOT` of trainckpt."""
    head, at, tail = path.rpartition("@")
    run = head if at and "/" not in tail else path
    return bool(filesystem.isdir(filesystem.join(run, ATTEMPTS)))


def refuse_config(config: Any) -> None:
    """Raise `ConfigurationError` for keys that trainckpt does not honour."""
    keys = {"keep_last": "keep_latest_k", "init_from": "initial_load_path"}
    doubled = sorted(keys.keys() & config.options.keys())
    unknown = sorted(config.options.keys() - TABLE.keys())
    path = config.initial_load_path
    of_run = bool(path) and _is_run(path)
    refusals: tuple[tuple[bool, str, str], ...] = (
        (
            config.create_seed_checkpoint,
            "create_seed_checkpoint asks for weights in torchtitan's format, before any training",
            "make it with torchtitan's own manager, then name it in initial_load_path",
        ),
        (
            config.load_only,
            "load_only=True asks for a training without saves, and each run of trainckpt is saved",
            "name another checkpoint.folder, and this run in initial_load_path",
        ),
        (
            bool(config.exclude_from_loading) and (of_run or not path),
            f"exclude_from_loading={config.exclude_from_loading} asks for an inexact resume",
            "leave it out, or name another checkpoint.folder, and this run in initial_load_path",
        ),
        (
            of_run and not config.initial_load_model_only,
            "initial_load_model_only=False asks for the whole state of another run of trainckpt",
            "leave initial_load_model_only=True, or go on with that run by checkpoint.folder",
        ),
        (
            of_run and config.initial_load_in_hf,
            "initial_load_in_hf=True, and initial_load_path is a run of trainckpt",
            "leave initial_load_in_hf=False",
        ),
        (
            bool(doubled),
            f"{', '.join(doubled)} among the options has a key in [checkpoint]",
            "; ".join(f"set checkpoint.{keys[name]}" for name in doubled),
        ),
        (
            bool(unknown),
            f"{', '.join(unknown)} among the options is none of trainckpt's",
            "use names of docs/options.md, which `trainckpt config` lists",
        ),
    )
    for refused, why, instead in refusals:
        if refused:
            raise ConfigurationError(f"checkpoint: {why}", hint=instead)


def config_in_place_of(config: Any, options: dict[str, Any]) -> Any:
    """Return a configuration of trainckpt's manager, with the keys of another manager's.

    Raises:
        ConfigurationError: The other one has keys of its own.
    """
    known = {each.name for each in fields(TorchtitanManager.Config)}
    unknown = sorted({each.name for each in fields(config)} - known)
    if unknown:
        raise ConfigurationError(
            f"checkpoint: {type(config).__qualname__} has keys that trainckpt does not know: "
            f"{', '.join(unknown)}",
            hint="use trainckpt with the keys of torchtitan's own CheckpointManager.Config",
        )
    options = {**getattr(config, "options", {}), **options}
    return derive(config, TorchtitanManager.Config, options=options)


# ---- the Trainer


class _DataMesh(NamedTuple):
    """Part of a device mesh that a Checkpointer reads: the ranks that train different data."""

    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]


def data_world(trainer: Any) -> dict[str, Any]:
    """Return the keywords that say which ranks see different data, where not all do."""
    dims = trainer.parallel_dims
    num_ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
    if num_ranks == dims.world_size:
        return {}
    return {"mesh": _DataMesh(("batch",), (num_ranks,)), "data_dims": ("batch",)}


_LOOP = ("train", "train_step", "batch_generator", "state_dict", "load_state_dict")


def refuse_trainer(trainer: Any) -> None:
    """Raise `ConfigurationError` for a loop, or state of a trainer, that is not torchtitan's."""
    kind, what = type(trainer), "a loop of its own"
    if isinstance(trainer, Trainer):
        own = [name for name in _LOOP if getattr(kind, name) is not getattr(Trainer, name)]
        if not own:
            return
        what = f"its own {' and '.join(own)}"
    raise ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} has {what}, which trainckpt neither follows nor "
        "saves",
        hint="use torchtitan.trainer.Trainer, or trainckpt.Checkpointer in that loop",
    )
