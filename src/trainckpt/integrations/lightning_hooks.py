"""State that a script hands to Lightning by hooks: callbacks, data module, on_save_checkpoint.

Beside what their `state_dict` says, two kinds of Lightning's own callbacks forget something that
shows after a resume; `_FORGOTTEN` names it.

Hooks that add to a checkpoint may rely on what `on_train_start` made, as in Lightning, where
nothing is saved before. So they are asked from the first boundary on. Modules that callbacks make
as late as that are kept here as well, since they are not there when objects are registered.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainckpt.errors import StateMismatch
from trainckpt.integrations.lightning_needs import is_a

_FORGOTTEN = {
    "ModelCheckpoint": (
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
        "current_score",  # its state_dict has it, its load_state_dict leaves it
    ),
    "WeightAveraging": ("_latest_update_step", "_latest_update_epoch"),
}


class HookState:
    """Everything of that kind; tracked under the name "hooks".

    Args:
        trainer: Whose.
        ours: Our own callback.
        registered: Modules of callbacks that are tracked by themselves.

    Attributes:
        begun: The first boundary was reached: everybody's on_train_start is over.
    """

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any, ours: object, registered: dict[str, nn.Module]) -> None:
        self.begun = False
        self._trainer = trainer
        self._registered = registered
        self._callbacks = {c.state_key: c for c in trainer.callbacks if c is not ours}
        self._kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What callbacks, the data module and the module's hooks want to be kept."""
        data = self._trainer.datamodule
        return {
            "callbacks": {key: _read(callback) for key, callback in self._callbacks.items()},
            "data": data.state_dict() if data is not None else {},
            "checkpoint": self._kept_by_hooks() if self.begun else self._kept,
            "modules": {name: dict(m.state_dict()) for name, m in self._late_modules().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand it all back, in Lightning's own order: data, module, callbacks.

        Raises:
            StateMismatch: training has begun without a module that a callback had made by then.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        self._kept = state["checkpoint"]
        checkpoint = _merged(self._offered(), self._kept)
        if trainer.datamodule is not None and state["data"]:
            trainer.datamodule.load_state_dict(state["data"])
        if state["checkpoint"]:
            module.on_load_checkpoint(checkpoint)
        for key, callback in self._callbacks.items():
            if state["checkpoint"] and not is_a(callback, *_FORGOTTEN):
                callback.on_load_checkpoint(trainer, module, checkpoint)
            if key in state["callbacks"]:
                _write(callback, state["callbacks"][key])
        self._load_late_modules(state.get("modules", {}))

    def stateless(self) -> list[Any]:
        """Return the callbacks that say no state: neither by state_dict nor by a hook."""
        return [
            callback
            for callback in self._callbacks.values()
            if not callback.state_dict()
            and getattr(type(callback).on_save_checkpoint, "__qualname__", "").startswith(
                "Callback."
            )
        ]

    def _late_modules(self) -> dict[str, nn.Module]:
        known = self._registered
        return {n: m for n, m in modules_of(self._trainer).items() if known.get(n) is not m}

    def _load_late_modules(self, saved: dict[str, Any]) -> None:
        found = self._late_modules()
        if self.begun and saved.keys() - found.keys():
            raise StateMismatch(
                "callbacks lack modules that are in the snapshot",
                sorted(saved.keys() - found.keys()),
                hint="run the script with the callbacks it had, in their order",
            )
        for name in saved.keys() & found.keys():
            found[name].load_state_dict(saved[name])

    def _kept_by_hooks(self) -> dict[str, Any]:
        """What on_save_checkpoint of callbacks and of the module add to a checkpoint."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._offered()
        offered = {name: _shallow(value) for name, value in checkpoint.items()}
        for callback in self._callbacks.values():
            if not is_a(callback, *_FORGOTTEN):
                callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return _added(checkpoint, offered)

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


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _added(checkpoint: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Entries that are new, and of the dicts that were offered what is new or another object."""
    found = {name: value for name, value in checkpoint.items() if name not in offered}
    for name, before in offered.items():
        now = checkpoint.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            other = {k: v for k, v in now.items() if k not in before or v is not before[k]}
            found.update({name: other} if other else {})
    return found


def _merged(offered: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    inner = {n: {**v, **kept[n]} for n, v in offered.items() if n in kept and isinstance(v, dict)}
    return {**offered, **kept, **inner}


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
