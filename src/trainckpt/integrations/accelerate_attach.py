"""`attach`: a Checkpointer for all objects of an Accelerator.

Accelerate has no hook at a micro-batch; the boundary is where the loop asks `ckpt.loader(loader)`
for its next batch. Accelerate's own save_state and load_state are not touched.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.checkpointer import Checkpointer
from trainckpt.data import sampler
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import How, Restored
from trainckpt.integrations import accelerate_loader
from trainckpt.integrations.compat import check, check_object, one_or_all

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator

    from trainckpt.format.cursor import Cursor


# ---- an Accelerator's objects to track, and its own state


_RELIED = (
    ("accelerate:Accelerator", "_do_sync", "counts the micro-batches of a window"),
    ("accelerate:Accelerator", "accumulate", "opens and closes a window"),
    ("accelerate.state:GradientState", "_set_sync_gradients", "ends a window"),
    ("accelerate.optimizer:AcceleratedOptimizer", "step_was_skipped", "knows a skipped step"),
)
_MADE = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "step")
_ACCUMULATE = "gradient_accumulation_steps"
_WINDOWS = ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")  # of a plugin
_NEVER = {
    "DEEPSPEED": "use FSDP2 (fsdp_version=2), or deepspeed.initialize with a plain Checkpointer "
    "(docs/deepspeed.md), or DeepSpeed's own save_checkpoint",
    "MEGATRON_LM": "use FSDP2 (fsdp_version=2), or Megatron's dist_checkpointing",
    "XLA": "use CPUs or GPUs",
}


def refuse_accelerator(accelerator: Any) -> None:
    """Raise `ConfigurationError` if its state inside a window cannot be saved."""
    check_object("accelerate", accelerator, [(name, "trainckpt reads") for name in _MADE])
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _NEVER:
        raise ConfigurationError(
            f"this Accelerator trains with {kind}, which keeps state where trainckpt cannot see it",
            hint=_NEVER[kind],
        )
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        raise ConfigurationError(
            "this Accelerator trains with FSDP1, which flattens parameters and hides gradients",
            hint="FullyShardedDataParallelPlugin(fsdp_version=2)",
        )
    if not accelerator._models and not accelerator._optimizers:
        raise ConfigurationError(
            "nothing was prepared yet, so there is nothing to save",
            hint="call attach after accelerator.prepare(model, optimizer, ...)",
        )


def tracked_of(accelerator: Any) -> dict[str, Any]:
    """Return everything prepared or registered, by the names used in snapshots."""
    optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
    named = {
        "model": [_wrapped(model) for model in _distinct(accelerator._models)],
        "optimizer": _distinct(optimizers),
        "scheduler": _distinct([getattr(s, "scheduler", s) for s in accelerator._schedulers]),
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    seen = {id(one) for group in named.values() for one in group}
    own = [getattr(one, "scheduler", one) for one in accelerator._custom_objects]
    named["registered"] = [one for one in _distinct(own) if id(one) not in seen]
    return {name: one_or_all(objects) for name, objects in named.items() if objects}


def identities(accelerator: Any) -> set[int]:
    """Return the ids of the objects prepared or registered now."""
    held = (accelerator._models, accelerator._optimizers, accelerator._schedulers)
    return {id(one) for group in (*held, accelerator._custom_objects) for one in group}


class AcceleratorState:
    """State of an Accelerator between micro-batches, as one object to track.

    It has the phase of the window, skipped steps, the number of its next own checkpoint, and a
    trigger set but not checked. For untracked prepared loaders (an evaluation's) it has their epoch
    and generators. It also has the `gradient_accumulation_steps` when attached, since scripts may
    change it by the epoch, and again after a resume, and other settings that change the numbers.

    Args:
        accelerator: The Accelerator.
        tracked: Returns the prepared loaders with their position saved elsewhere, in order.

    Attributes:
        tracked_then: The prepared loaders tracked in the loaded state.
    """

    __trainckpt_loads_in_steps__ = True

    def __init__(self, accelerator: Any, tracked: Callable[[], list[Any]]) -> None:
        self.tracked_then: list[Any] = []
        self._accelerator = accelerator
        self._tracked = tracked
        self._accumulate = int(accelerator.gradient_accumulation_steps)

    def tracked_now(self) -> list[int]:
        """Return the indices of tracked loaders among the prepared ones, in order."""
        prepared = {id(loader): i for i, loader in enumerate(self._accelerator._dataloaders)}
        return [prepared[id(loader)] for loader in self._tracked()]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and generators' states."""
        accelerator = self._accelerator
        tracked = self.tracked_now()
        return {
            "step": accelerator.step,
            "sync_gradients": bool(accelerator.gradient_state.sync_gradients),
            "skipped": [bool(one.step_was_skipped) for one in accelerator._optimizers],
            "checkpoints": accelerator.project_configuration.iteration,
            "trigger": accelerator.flag_tensor,
            _ACCUMULATE: self._accumulate,
            "settings": self._settings(),
            "tracked": tracked,
            "loaders": {
                str(i): {
                    "iteration": getattr(loader, "iteration", 0),
                    "order": sampler.capture(loader.base_dataloader, stateful=False),
                }
                for i, loader in enumerate(accelerator._dataloaders)
                if i not in tracked
            },
        }

    def problems(self, tracked: Collection[int]) -> list[str]:
        """Return the obstacles to an exact resume by untracked loaders; `tracked`: indices."""
        return [
            f"prepared loader {i} has persistent_workers=True and is not read through ckpt.loader, "
            "so a resume makes its workers anew, with other randomness: read it through "
            "ckpt.loader as well, made before training begins and after the training loader's, "
            "or leave persistent_workers=False"
            for i, loader in enumerate(self._accelerator._dataloaders)
            for under in [loader.base_dataloader]
            if i not in tracked
            and getattr(under, "persistent_workers", False)
            and under.num_workers > 0
        ]

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        now = {_ACCUMULATE: self._accumulate, **self._settings()}
        # an older snapshot does not know all of them
        then = {**now, **saved.get("settings", {})}
        then[_ACCUMULATE] = saved.get(_ACCUMULATE, self._accumulate)
        other = [f"{n} was {then[n]}, is {value}" for n, value in now.items() if then[n] != value]
        return self.problems(saved["tracked"]) + other

    def _settings(self) -> dict[str, Any]:
        accelerator = self._accelerator
        windows = {name: getattr(accelerator.gradient_state, name, None) for name in _WINDOWS}
        return {
            "mixed_precision": str(accelerator.mixed_precision),
            "step_scheduler_with_optimizer": bool(accelerator.step_scheduler_with_optimizer),
            **{name: bool(value) for name, value in windows.items() if value is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        accelerator = self._accelerator
        accelerator.step = state["step"]
        accelerator.gradient_state._set_sync_gradients(state["sync_gradients"])
        for one, skipped in zip(accelerator._optimizers, state["skipped"], strict=False):
            one._is_overflow = skipped
        accelerator.project_configuration.iteration = state["checkpoints"]
        trigger = state.get("trigger")
        accelerator.flag_tensor = None if trigger is None else trigger.to(accelerator.device)
        for i, loader in enumerate(accelerator._dataloaders):
            if saved := state["loaders"].get(str(i)):
                loader.iteration = saved["iteration"]
                sampler.restore(loader.base_dataloader, saved["order"])
        loaders = accelerator._dataloaders
        self.tracked_then = [loaders[i] for i in state["tracked"] if i < len(loaders)]


def _wrapped(model: Any) -> Any:
    """Return the DDP around a prepared model, for its hidden state; without one, the model.

    Accelerate returns the wrapper to the script, and itself keeps only the model inside.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return model
    found = model
    for one in gc.get_objects():
        # type() and not isinstance(), which asks proxies for their __class__
        if issubclass(type(one), DistributedDataParallel) and one.module is model:
            found = one  # the newest, if it was wrapped again
    return found


def _distinct(objects: list[Any]) -> list[Any]:
    return list({id(one): one for one in objects}.values())


# ---- attach


_attached: weakref.WeakKeyDictionary[Any, weakref.ref[AttachedCheckpointer]] = (
    weakref.WeakKeyDictionary()
)


def attach(
    accelerator: Any, run: str | os.PathLike[str] | None = None, **keywords: Any
) -> AttachedCheckpointer:
    """Track everything prepared or registered, and resume. Call it after `accelerator.prepare`.

    Args:
        accelerator: The Accelerator with the prepared objects.
        run: Run directory, visible to all hosts; by default that of `trainckpt run --run`.
        **keywords: Options (docs/options.md), and further objects to track, each under its name.

    Returns:
        A Checkpointer that has resumed. Take batches from `ckpt.loader(loader)`.

    Raises:
        ConfigurationError: An object cannot be saved or restored exactly; the message has the
            change to make.
        StateMismatch: The snapshot holds other objects.
    """
    check("accelerate", _RELIED)
    accelerate_loader.check_loaders()
    refuse_accelerator(accelerator)
    before = _attached.get(accelerator, lambda: None)()
    if before is not None and not before.has_ended:
        raise ConfigurationError(
            "this Accelerator is attached already, and each run is saved once",
            hint="keep the Checkpointer that the first attach returned",
        )
    ckpt = AttachedCheckpointer(accelerator, run, keywords)
    _attached[accelerator] = weakref.ref(ckpt)
    ckpt.resume()
    ckpt._loop_checks.note_epoch(is_known=False)  # the script has not seen the epoch
    return ckpt


class AttachedCheckpointer(Checkpointer):
    """A Checkpointer for the objects of an Accelerator."""

    def __init__(self, accelerator: Any, run: Any, keywords: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._prepared: list[tuple[Any, accelerate_loader.PreparedLoader]] = []
        tracked = tracked_of(accelerator)
        self._remembered = AcceleratorState(
            accelerator, lambda: [shard for shard, _ in self._prepared]
        )
        tracked["accelerator"] = self._remembered
        taken = sorted(tracked.keys() & keywords.keys())
        if taken:
            raise ConfigurationError(
                f"{', '.join(taken)}: attach tracks what was prepared under this name already",
                hint="leave it out, or choose another keyword for an object of your own",
            )
        self._known = identities(accelerator)
        super().__init__(run, **tracked, **keywords)

    @property
    def has_ended(self) -> bool:
        """True once the attempt has finished, stopped or failed."""
        return self._attempt is not None and self._attempt.shutdown.left

    def resume(self, mode: str | None = None) -> Cursor:
        """Resume from the newest usable snapshot, and track its loaders at once."""
        cursor = super().resume(mode)
        for shard in self._remembered.tracked_then:
            self.loader(shard)
        return cursor

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs left of `number`, from the current one; then close.

        A loop that is left early calls `ckpt.close()`, or stands in a `with` statement.
        """
        yield from super().epochs(number)
        self.close()

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """Return a loader with the batches of a prepared one and a boundary before each of them.

        Raises:
            ConfigurationError: The loader is not prepared, or its position cannot be saved; the
                message has the change to make.
        """
        if isinstance(loader, TrackedLoader):
            return super().loader(loader)
        for shard, known in self._prepared:
            if loader is shard:
                return super().loader(known)
        self._must_be_prepared(loader)
        prepared = accelerate_loader.PreparedLoader(loader)
        self._prepared.append((loader, prepared))
        return super().loader(prepared)

    def _boundary_near_start(self, **boundary: bool) -> None:
        if self._awaits_first_boundary:  # all loaders to track are tracked by now
            problems = self._remembered.problems(self._remembered.tracked_now())
            self._note([Restored("accelerator", How.NOT_KEPT, problem) for problem in problems])
        super()._boundary_near_start(**boundary)

    def _must_be_prepared(self, loader: Any) -> None:
        accelerator = self._accelerator
        if not any(loader is one for one in accelerator._dataloaders):
            raise ConfigurationError(
                "this loader was not prepared by the Accelerator that is attached",
                hint="loader = accelerator.prepare(loader), then ckpt.loader(loader)",
            )
        if identities(accelerator) - self._known:
            raise ConfigurationError(
                "something was prepared or registered after attach, and would not be saved",
                hint="call attach after the last accelerator.prepare and "
                "register_for_checkpointing",
            )
