"""Capture and restore objects with `state_dict` and `load_state_dict`, and metrics.

Examples are schedulers, scalers and the user's own objects. A value only storable by pickling is
refused at registration, with the path to it. Functions inside LambdaLR and its like are not in a
state_dict: the script makes them again. A state_dict may contain live objects, as that of a
scheduler around another one. Their own state is stored instead, and a restore passes the existing
objects.

torchmetrics omits states from a state_dict unless they are persistent, and the number of updates
always. Without them the metric of an interrupted epoch would cover only its second part. So every
state and number is stored. torchmetrics is not imported here: metrics exist only after the script's
import.
"""

from __future__ import annotations

import re
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.exactness import How, Restored
from trainckpt.state.adapters.model import kept_elsewhere
from trainckpt.state.captured import Captured
from trainckpt.state.staging import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.state.captured import Saved

    Spell = Callable[[dict[str, Any]], str]


class GenericState:
    """One tracked object with its own state methods.

    Attributes:
        implied: Tracked because it belongs to another tracked object. Snapshots of older releases
            lack it.
    """

    def __init__(self, name: str, target: Any, *, implied: bool = False) -> None:
        self.name = name
        self.target = target
        self.implied = implied

    def capture(self, out: Captured) -> None:
        """Add the object's `state_dict()`."""
        out.values[self.name] = _capture(_state_dict(self.target), self.name, self.name, out)

    def is_empty_in(self, out: Captured) -> bool:
        """Return True if no state of the object was captured."""
        tree = out.values[self.name]
        return tree is None or tree == [] or (isinstance(tree, dict) and tree.get("of") == [])

    def restored(self, saved: Saved) -> list[Restored]:
        """Return the parts missing from the object's saved state."""
        return [Restored(self.name, How.NOT_KEPT, sentence) for sentence in self._lost(saved)]

    def _lost(self, saved: Saved) -> list[str]:
        if self.name not in saved.values:
            return [f"the state of {self.name} is not in the snapshot"]
        say = getattr(type(self.target), "__trainckpt_problems__", None)
        state = saved.values[self.name]
        return [] if say is None else list(say(self.target, saved.decode(state)))

    def apply(self, saved: Saved) -> None:
        """Pass the decoded state to the object's `load_state_dict`."""
        if self.name not in saved.values:  # implied, or not in an imported checkpoint
            return
        _load(self.target, saved.values[self.name], saved)

    def compare(self, saved: Saved) -> list[Restored]:
        """Return the saved state missing right after it was loaded, as one part."""
        if self.name not in saved.values:
            return []
        if getattr(type(self.target), "__trainckpt_loads_in_steps__", False):
            return []
        live = Captured()
        try:
            self.capture(live)
        except _NO_STATE as error:
            why = f"{self.name} does not tell its state after it was loaded: {error}"
            return [Restored(self.name, How.NOT_KEPT, why[:300])]
        then = _leaves(saved.values[self.name], self.name, _spell(saved.tensors))
        now = _leaves(live.values[self.name], self.name, _spell(live.tensors))
        paths = sorted(
            path
            for path in then.keys() | now.keys()
            if then.get(path) != now.get(path) and not _ran_on(path, then.get(path), now.get(path))
        )
        if not paths:
            return []
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        kind = type(self.target).__qualname__
        why = (
            f"{self.name}: what a {kind} gives by state_dict() after load_state_dict() is not what "
            f"was loaded: {', '.join(paths[:_NAMED])}{more}"
        )
        return [Restored(self.name, How.NOT_KEPT, why)]


def _capture(state: Any, path: str, group: str, out: Captured) -> Any:
    live = live_objects(state)
    if not live:
        return out.encode(state, path, group)
    plain = {key: value for key, value in state.items() if key not in live}
    states = {
        # an optimizer is tracked by itself, or not saved
        key: None
        if isinstance(value, torch.optim.Optimizer)
        else _capture(_state_dict(value), f"{path}.{key}", group, out)
        for key, value in live.items()
    }
    return {"plain": out.encode(plain, path, group), "live": states}


def _state_dict(target: Any) -> Any:
    """Return the target's state_dict, for a scheduler without functions that torch put there."""
    state = target.state_dict()
    return _without_anneal_func(state) if isinstance(target, LRScheduler) else state


def _without_anneal_func(state: Any) -> Any:
    """Drop SWALR's function, which torch 2.6 has in the state_dict: the script makes it again."""
    if type(state) is list:  # of the schedulers in a SequentialLR
        return [_without_anneal_func(one) for one in state]
    if type(state) is not dict:
        return state
    return {
        key: _without_anneal_func(value)
        for key, value in state.items()
        if not (key == "anneal_func" and isinstance(value, FunctionType))
    }


def _load(target: Any, tree: Any, saved: Saved) -> None:
    target.load_state_dict(_decode(target, tree, saved))


def _decode(target: Any, tree: Any, saved: Saved) -> Any:
    if not (isinstance(tree, dict) and tree.keys() == {"plain", "live"}):
        return saved.decode(tree)
    there = live_objects(target.state_dict())
    if there.keys() != tree["live"].keys():
        raise UnusableSnapshot(
            f"a {type(target).__name__} held {sorted(tree['live'])} when it was saved, and holds "
            f"{sorted(there)} now"
        )
    for key, value in there.items():
        if tree["live"][key] is not None:
            _load(value, tree["live"][key], saved)
    return {**saved.decode(tree["plain"]), **there}


def live_objects(state: Any) -> dict[str, Any]:
    """Return key -> object, for the objects in a state_dict with state methods of their own."""
    if type(state) is not dict:
        return {}
    return {
        key: value
        for key, value in state.items()
        if type(key) is str
        and not isinstance(value, (torch.Tensor, torch.nn.Module))
        and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    }


# ---- a tracked object's state_dict, compared after loading
#
# A `load_state_dict` may drop a part, cast it, or defer it. The object's state after loading is
# compared with the saved one, value by value and tensors by every byte. The order of a dict, list
# versus tuple, and a clock's advance do not count.
#
# Objects of integrations may load in several steps, or derive their state_dict from later
# registrations. They declare it (`__trainckpt_loads_in_steps__`), and are not compared.


_NAMED = 3  # most paths named in a reason
_NO_STATE = (
    *(TrainckptError, RuntimeError, AttributeError),
    *(TypeError, ValueError, LookupError),
)
_CLOCK = re.compile(r"(?:^|[._])(?:time|seconds|elapsed|duration|runtime)(?:$|[._])")


def _spell(tensors: dict[str, torch.Tensor]) -> Spell:
    def spell(node: dict[str, Any]) -> str:
        names = node.get("parts", [node["$tensor"]])
        found = [tensor_digest(tensors[name]) if name in tensors else "" for name in names]
        return f"{found} {node.get('sparse')}"

    return spell


def _leaves(tree: Any, path: str, spell: Spell) -> dict[str, Any]:
    """Return path -> value of an encoded tree; for an empty container the path alone."""
    if isinstance(tree, dict) and "$tensor" in tree:
        return {path: spell(tree)}
    if isinstance(tree, dict) and tree.get("$") == "numpy" and isinstance(tree["of"], dict):
        return {path: (tree["dtype"], tree["shape"], spell(tree["of"]))}
    pairs: list[tuple[str, Any]]
    if isinstance(tree, list):
        pairs = [(str(number), item) for number, item in enumerate(tree)]
    elif isinstance(tree, dict) and tree.get("$") == "dict":
        pairs = [
            (key if isinstance(key, str) else json_io.canonical(key).decode(), item)
            for key, item in tree["of"]
        ]
    elif isinstance(tree, dict) and "$" not in tree:  # live objects in a state_dict
        pairs = list(tree.items())
    elif isinstance(tree, dict) and isinstance(tree["of"], list) and tree["$"] != "complex":
        pairs = [(str(number), item) for number, item in enumerate(tree["of"])]
    else:
        return {path: tree}
    found: dict[str, Any] = {} if pairs else {path: ()}
    for key, item in pairs:
        found.update(_leaves(item, f"{path}.{key}", spell))
    return found


def _ran_on(path: str, then: Any, now: Any) -> bool:
    """Return True for a time value, by its name, if it has advanced since the save."""
    are_times = type(then) is float and type(now) is float and _CLOCK.search(path) is not None
    return are_times and now >= then


COUNTS = ("_update_count", "_computed", "_forward_cache")
# Attributes of torchmetrics' own wrappers besides their metrics' states.
_BESIDE = {"Running": ("_num_vals_seen",), "MinMaxMetric": ("min_val", "max_val")}


def metrics_in(module: nn.Module) -> list[nn.Module]:
    """Return the metrics and collections among a module and its parts."""
    return [p for p in module.modules() if _is_a(p, "Metric") or _is_a(p, "MetricCollection")]


def is_metric(module: nn.Module) -> bool:
    """Return True for a metric or a collection without parameters."""
    is_one = any(module is metric for metric in metrics_in(module))
    return is_one and next(module.parameters(), None) is None


class MetricState:
    """The metrics among modules and their parts, as one object to track.

    Args:
        modules: Returns them by name. Called each time: some make theirs when training starts.
    """

    def __init__(self, modules: Callable[[], Mapping[str, nn.Module]]) -> None:
        self._modules = modules
        for module in modules().values():
            for metric in metrics_in(module):
                kept_elsewhere(metric)

    def holds(self, metric: nn.Module) -> bool:
        """Return True if `metric` is one of them."""
        return any(metric is part for _, part in self._parts())

    def state_dict(self) -> dict[str, Any]:
        """Return every state of every metric, by its path."""
        for _, part in self._parts("MetricCollection"):
            list(part.values(copy_state=False))  # updates the metrics with a shared state
        grown = {path: {"grown": len(tracker)} for path, tracker in self._parts("MetricTracker")}
        return {**grown, **{path: _read(metric) for path, metric in self._parts("Metric")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states, each on its metric's device."""
        if state and not any(isinstance(item, dict) for item in state.values()):
            for module in self._modules().values():  # from an older release: a metric's own
                module.load_state_dict(state)
            return
        for path, tracker in self._parts("MetricTracker"):
            _grow(tracker, state.get(path, {}).get("grown", len(tracker)))
        for path, metric in self._parts("Metric"):
            for name, value in state.get(path, {}).items():
                setattr(metric, name, _on(metric.device, value))

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        missing = [path or "the metric" for path, _ in self._parts("Metric") if path not in saved]
        return [f"the snapshot does not hold all of {path}" for path in missing]

    def _parts(self, *kinds: str) -> list[tuple[str, Any]]:
        kinds = kinds or ("Metric", "MetricCollection", "MetricTracker")
        return [
            (path, part)
            for name, module in self._modules().items()
            for path, part in module.named_modules(prefix=name)
            if any(_is_a(part, kind) for kind in kinds)
        ]


def _is_a(value: object, kind: str) -> bool:
    """Return True for an instance of this torchmetrics class."""
    found = getattr(sys.modules.get("torchmetrics"), kind, None)
    return isinstance(found, type) and isinstance(value, found)


def _grow(tracker: Any, length: int) -> None:
    """Set a tracker's number of metrics; a script may have added one for this epoch."""
    while len(tracker) < length:
        tracker.increment()
    while len(tracker) > length:
        del tracker._modules[str(len(tracker) - 1)]


def _read(metric: Any) -> dict[str, Any]:
    kinds = {kind.__name__ for kind in type(metric).__mro__}
    beside = [name for kind, names in _BESIDE.items() if kind in kinds for name in names]
    names = (*metric._defaults, *COUNTS, *(name for name in beside if hasattr(metric, name)))
    return {name: _plain(getattr(metric, name)) for name in names}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_on(device, item) for item in value]
    return value
