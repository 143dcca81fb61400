"""Find the objects of an Accelerator to track, and its own state besides them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.data import sampler
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.compat import RequiredAttribute

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

RELIED = (
    RequiredAttribute("accelerate:Accelerator", "_do_sync", "counts the micro-batches of a window"),
    RequiredAttribute("accelerate:Accelerator", "accumulate", "opens and closes a window"),
    RequiredAttribute("accelerate.state:GradientState", "_set_sync_gradients", "ends a window"),
    RequiredAttribute(
        "accelerate.optimizer:AcceleratedOptimizer", "step_was_skipped", "knows a skipped step"
    ),
)
MADE = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "step")
_ACCUMULATE = "gradient_accumulation_steps"
_NEVER = {
    "DEEPSPEED": "use FSDP2 (fsdp_version=2), or DeepSpeed's own save_checkpoint",
    "MEGATRON_LM": "use FSDP2 (fsdp_version=2), or Megatron's dist_checkpointing",
    "XLA": "use CPUs or GPUs",
}


def refuse_accelerator(accelerator: Any) -> None:
    """Raise `ConfigurationError` if its state inside a window cannot be saved."""
    missing = [name for name in MADE if not hasattr(accelerator, name)]
    if missing:
        raise ConfigurationError(
            f"this Accelerator lacks {', '.join(missing)}, which trainckpt reads",
            hint="use a version of accelerate named in docs/versions.md",
        )
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
    return {
        name: objects[0] if len(objects) == 1 else objects
        for name, objects in named.items()
        if objects
    }


def identities(accelerator: Any) -> set[int]:
    """Return the ids of the objects prepared or registered now."""
    held = (accelerator._models, accelerator._optimizers, accelerator._schedulers)
    return {id(one) for group in (*held, accelerator._custom_objects) for one in group}


class AcceleratorState:
    """State of an Accelerator between micro-batches, as one object to track.

    It has the phase of the window, skipped steps, the number of its next own checkpoint, and a
    trigger set but not checked. For untracked prepared loaders (an evaluation's) it has their epoch
    and generators. It also has the `gradient_accumulation_steps` when attached: scripts may change
    it by the epoch, and again after a resume.

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
            if i not in tracked and _keeps_workers(loader)
        ]

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        # an older snapshot does not know it
        then, now = saved.get(_ACCUMULATE, self._accumulate), self._accumulate
        other = [f"{_ACCUMULATE} was {then}, is {now}"] if then != now else []
        return self.problems(saved["tracked"]) + other

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
            held = state["loaders"].get(str(i))
            if held is not None:
                loader.iteration = held["iteration"]
                sampler.restore(loader.base_dataloader, held["order"])
        there = dict(enumerate(accelerator._dataloaders))
        self.tracked_then = [there[i] for i in state["tracked"] if i in there]


def _keeps_workers(loader: Any) -> bool:
    under = loader.base_dataloader
    return bool(getattr(under, "persistent_workers", False) and under.num_workers > 0)


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
