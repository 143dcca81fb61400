"""Track the state of Lightning's loops, of self.log, and of hooks.

Loops: the boundary lies inside the fetch of a training batch. So save and resume are at the same
line of Lightning's code, and every counter is simply restored there. The new process gets there as
a new fit does, not through Lightning's own restart stages. On the way it only needs the right
epoch. Hence two loads:

    enter    before the fit loop runs: the counters; epochs as between two epochs
    arrive   at the first boundary: everything. Nothing if the fit was over at the snapshot: a new
             epoch follows

self.log: Lightning has no state_dict for the sums of an epoch so far. Without them the means of an
interrupted epoch would cover only its second part.

Hooks: callbacks, data module, and on_save_checkpoint pass state to Lightning. Besides their
`state_dict`, two kinds of Lightning's own callbacks need the attributes in `_FORGOTTEN`.

Hooks with additions to a checkpoint may rely on objects made in `on_train_start`, since Lightning
saves nothing before. So they are called from the first boundary on. Modules made by callbacks as
late as that are stored here too: they do not exist at registration.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainckpt.errors import StateMismatch
from trainckpt.integrations.lightning_compat import is_a, part_of
from trainckpt.state.adapters.stateful import COUNTS

if TYPE_CHECKING:
    from collections.abc import Iterator


_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# Arguments of the Trainer that change the numbers of a training; the script's new value applies.
_SETTINGS = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
)


class LoopState:
    """The position of the Trainer's fit loop; tracked under the name "trainer"."""

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._accumulate = _accumulation(trainer)
        self._settings = _settings(trainer)
        self._loads = 0
        self._progress = part_of(trainer, "loops.progress")._BaseProgress
        self._loop = part_of(trainer, "loops.loop")._Loop

    def state_dict(self) -> dict[str, Any]:
        """Return all counters and logged values at a boundary."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        connector = trainer._logger_connector
        return {
            "world": trainer.world_size,
            "progress": {path: p.state_dict() for path, p in self._counters(fit, "fit")},
            "batches_that_stepped": fit.epoch_loop._batches_that_stepped,
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "accumulate_configured": self._accumulate,
            "settings": self._settings,
            "first_iteration": connector._first_loop_iter,
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "results": [_read_result(*item) for item in fit.epoch_loop._results.items()],
        }

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        then, now = saved.get("settings", {}), self._settings
        changed = [name for name in now if name in then and then[name] != now[name]]
        found = [f"{name} was {then[name]}, is {now[name]}" for name in changed]
        if not self._accumulates_as(saved):
            old, new = _shown(saved["accumulate_configured"]), _shown(self._accumulate)
            found.append(f"accumulate_grad_batches was {old}, is {new}")
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Enter at the first call; arrive at the second.

        Raises:
            StateMismatch: Another number of ranks: Lightning's counters are those of one rank.
        """
        if state["world"] != self._trainer.world_size:
            raise StateMismatch(
                "a fit of Lightning cannot go on with another number of ranks",
                [f"it had {state['world']} ranks, and has {self._trainer.world_size}"],
                hint=f"start it with {state['world']} ranks, or begin a new run from its weights: "
                "init_from",
            )
        self._loads += 1
        fit = self._trainer.fit_loop
        if self._loads == 1:
            self._put(state)
            for part in (fit.epoch_progress.total, fit.epoch_progress.current):
                part.ready = part.started = part.completed = part.processed
        elif _inside_an_epoch(state):
            self._put(state)
            self._put_open_epoch(state)

    def _put(self, state: dict[str, Any]) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        for path, progress in self._counters(fit, "fit"):
            if path in state["progress"]:
                progress.load_state_dict(state["progress"][path])
        fit.epoch_loop._batches_that_stepped = state["batches_that_stepped"]
        trainer.should_stop = state["should_stop"]
        for name in _METRICS:
            setattr(trainer._logger_connector, name, dict(state["metrics"][name]))

    def _put_open_epoch(self, state: dict[str, Any]) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        if self._accumulates_as(state):  # else the script's new value applies from here on
            trainer.accumulate_grad_batches = state["accumulate"]
        trainer._logger_connector._first_loop_iter = state["first_iteration"]
        write_results(trainer, fit.epoch_loop._results, state["results"])
        fetched = fit.epoch_loop.batch_progress.current.ready
        fit._data_fetcher.fetched = fetched
        fit._combined_loader._iterator._idx = fetched

    def _accumulates_as(self, state: dict[str, Any]) -> bool:
        """Return True if it was configured the same then, or if the snapshot does not say."""
        return bool(state.get("accumulate_configured", self._accumulate) == self._accumulate)

    def _counters(self, loop: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield every counter of a loop and of its inner loops, by path."""
        for name, value in vars(loop).items():
            if isinstance(value, self._progress):
                yield f"{path}.{name}", value
            elif isinstance(value, self._loop):
                yield from self._counters(value, f"{path}.{name}")


def _accumulation(trainer: Any) -> dict[str, int]:
    """Return epoch -> micro-batches per window from there on, as configured before training.

    A GradientAccumulationScheduler changes the Trainer's own number at the start of epochs.
    """
    plans = [c for c in trainer.callbacks if is_a(c, "GradientAccumulationScheduler")]
    plan = plans[-1].scheduling if plans else {0: trainer.accumulate_grad_batches}
    return {str(epoch): int(plan[epoch]) for epoch in sorted(plan)}


def _settings(trainer: Any) -> dict[str, Any]:
    found = {name: getattr(trainer, name, None) for name in _SETTINGS}
    plain = (type(None), bool, int, float)
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items()}


def _shown(plan: dict[str, int]) -> str:
    if plan.keys() == {"0"}:
        return str(plan["0"])
    return str({epoch: plan[str(epoch)] for epoch in sorted(map(int, plan))})


def _inside_an_epoch(state: dict[str, Any]) -> bool:
    epochs = state["progress"]["fit.epoch_progress"]["current"]
    return bool(epochs["ready"] != epochs["processed"])


_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def write_results(trainer: Any, results: Any, saved: list[dict[str, Any]]) -> None:
    """Recreate the logged values; later calls of self.log continue them."""
    module = part_of(trainer, "trainer.connectors.logger_connector.result")
    results.clear()
    for one in saved:
        metadata = module._Metadata(**one["meta"], reduce_fx=getattr(torch, one["reduce"]))
        sync = module._Sync(
            _should=one["sync"], fn=trainer.strategy.reduce, rank_zero_only=one["rank_zero_only"]
        )
        metadata.sync = sync
        result = module._ResultMetric(metadata, one["is_tensor"])
        for name, value in one["state"].items():
            setattr(result, name, value)
        if not one["is_tensor"]:
            result.value = attrgetter(one["meta"]["metric_attribute"])(trainer.lightning_module)
        results[one["key"]] = result.to(trainer.strategy.root_device)


def _read_result(key: str, result: Any) -> dict[str, Any]:
    meta = result.meta
    state = {name: getattr(result, name) for name in (*COUNTS, "has_reset")}
    if result.is_tensor:
        state["value"] = result.value
        if meta.is_mean_reduction:
            state["cumulated_batch_size"] = result.cumulated_batch_size
    return {
        "key": key,
        "is_tensor": result.is_tensor,
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "state": state,
    }


_FORGOTTEN = {
    "ModelCheckpoint": (
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
        "current_score",  # in its state_dict, but ignored by its load_state_dict
    ),
    "WeightAveraging": ("_latest_update_step", "_latest_update_epoch"),
}


class HookState:
    """State from hooks of callbacks, data module and model; tracked under the name "hooks".

    Args:
        trainer: The Trainer.
        ours: The TrainckptCallback.
        registered: Modules of callbacks tracked by themselves.

    Attributes:
        begun: The first boundary was reached: every on_train_start is over.
    """

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any, ours: object, registered: dict[str, nn.Module]) -> None:
        self.begun = False
        self._trainer = trainer
        self._registered = registered
        self._callbacks = {c.state_key: c for c in trainer.callbacks if c is not ours}
        self._kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of callbacks, the data module and the module's hooks."""
        data = self._trainer.datamodule
        return {
            "callbacks": {
                key: {
                    "state": callback.state_dict(),
                    "forgotten": {name: getattr(callback, name) for name in _forgotten(callback)},
                }
                for key, callback in self._callbacks.items()
            },
            "data": data.state_dict() if data is not None else {},
            "checkpoint": self._kept_by_hooks() if self.begun else self._kept,
            "modules": {name: dict(m.state_dict()) for name, m in self._late_modules().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it in Lightning's own order: data, module, callbacks.

        Raises:
            StateMismatch: Training has begun without a module made by a callback then.
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
            if saved := state["callbacks"].get(key):
                if saved["state"]:
                    callback.load_state_dict(saved["state"])
                for name, value in saved["forgotten"].items():
                    setattr(callback, name, value)
        self._load_late_modules(state.get("modules", {}))

    def stateless(self) -> list[Any]:
        """Return the callbacks, and the data module, without state in state_dict or a hook."""
        found = [
            callback
            for callback in self._callbacks.values()
            if not callback.state_dict()
            and getattr(type(callback).on_save_checkpoint, "__qualname__", "").startswith(
                "Callback."
            )
        ]
        data = self._trainer.datamodule
        return found if data is None or data.state_dict() else [*found, data]

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
        """Return the additions to a checkpoint by on_save_checkpoint of callbacks and module."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._offered()
        offered = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in checkpoint.items()
        }
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


def _added(checkpoint: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Return new entries, and new or replaced entries inside the offered dicts."""
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
    """Return modules of callbacks besides the trained one, such as averaged weights."""
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
