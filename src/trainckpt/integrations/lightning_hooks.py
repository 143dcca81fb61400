"""State that a script hands to Lightning by hooks: callbacks, data module, on_save_checkpoint.

Beside what their `state_dict` says, two kinds of Lightning's own callbacks forget something that
shows after a resume; `_FORGOTTEN` names it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainckpt.integrations.lightning_needs import is_a

_FORGOTTEN = {
    "ModelCheckpoint": (
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    "WeightAveraging": ("_latest_update_step", "_latest_update_epoch"),
}


class HookState:
    """Everything of that kind; tracked under the name "hooks"."""

    def __init__(self, trainer: Any, ours: object) -> None:
        self._trainer = trainer
        self._callbacks = {c.state_key: c for c in trainer.callbacks if c is not ours}

    def state_dict(self) -> dict[str, Any]:
        """What callbacks, the data module and the module's hooks want to be kept."""
        data = self._trainer.datamodule
        return {
            "callbacks": {key: _read(callback) for key, callback in self._callbacks.items()},
            "data": data.state_dict() if data is not None else {},
            "checkpoint": self._kept_by_hooks(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand it all back, in Lightning's own order: data, module, callbacks."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = {**self._offered(), **state["checkpoint"]}
        if trainer.datamodule is not None and state["data"]:
            trainer.datamodule.load_state_dict(state["data"])
        if state["checkpoint"]:
            module.on_load_checkpoint(checkpoint)
        for key, callback in self._callbacks.items():
            if state["checkpoint"] and not is_a(callback, *_FORGOTTEN):
                callback.on_load_checkpoint(trainer, module, checkpoint)
            if key in state["callbacks"]:
                _write(callback, state["callbacks"][key])

    def _kept_by_hooks(self) -> dict[str, Any]:
        """What on_save_checkpoint of callbacks and of the module add to a checkpoint."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._offered()
        offered = set(checkpoint)
        for callback in self._callbacks.values():
            if not is_a(callback, *_FORGOTTEN):
                callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in offered}

    def _offered(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }


def modules_of(trainer: Any) -> dict[str, nn.Module]:
    """Modules that callbacks hold beside the one that is trained, such as averaged weights."""
    known = {id(part) for part in trainer.lightning_module.modules()}
    return {
        f"{type(callback).__name__}{number}{name}": value
        for number, callback in enumerate(trainer.callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module) and id(value) not in known
    }


def _forgotten(callback: Any) -> list[str]:
    named = (name for kind, names in _FORGOTTEN.items() if is_a(callback, kind) for name in names)
    return [name for name in named if hasattr(callback, name)]


def _read(callback: Any) -> dict[str, Any]:
    return {
        "state": callback.state_dict(),
        "forgotten": {name: getattr(callback, name) for name in _forgotten(callback)},
    }


def _write(callback: Any, saved: dict[str, Any]) -> None:
    if saved["state"]:
        callback.load_state_dict(saved["state"])
    for name, value in saved["forgotten"].items():
        setattr(callback, name, value)
