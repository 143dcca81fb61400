"""Metrics of torchmetrics: every state of each, and how often it was updated.

torchmetrics leaves states out of a state_dict unless they were made persistent, and the number of
updates always. Without them the metric of the epoch in which a run was stopped would cover its
second part only. torchmetrics is not imported here: there is no metric before the script has.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainckpt.state.kinds.model import kept_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

COUNTS = ("_update_count", "_computed", "_forward_cache")
# What torchmetrics' own wrappers hold beside the states they were given.
_BESIDE = {"Running": ("_num_vals_seen",), "MinMaxMetric": ("min_val", "max_val")}


def metrics_in(module: nn.Module) -> list[nn.Module]:
    """Return the metrics and collections of them that a module is or holds."""
    return [p for p in module.modules() if _is_a(p, "Metric") or _is_a(p, "MetricCollection")]


def is_metric(module: nn.Module) -> bool:
    """Return True for a metric or a collection without parameters."""
    is_one = any(module is metric for metric in metrics_in(module))
    return is_one and next(module.parameters(), None) is None


class MetricState:
    """The metrics that modules are or hold, as one object to track.

    Args:
        modules: Gives them by name. Asked each time, since some make theirs when training starts.
    """

    def __init__(self, modules: Callable[[], Mapping[str, nn.Module]]) -> None:
        self._modules = modules
        for module in modules().values():
            for metric in metrics_in(module):
                kept_elsewhere(metric)

    def holds(self, metric: nn.Module) -> bool:
        """Return True if this is one of them."""
        return any(metric is part for _, part in self._parts())

    def state_dict(self) -> dict[str, Any]:
        """Every state of every metric, by its path."""
        for _, part in self._parts("MetricCollection"):
            list(part.values(copy_state=False))  # those that share a state are brought up
        grown = {path: {"grown": len(tracker)} for path, tracker in self._parts("MetricTracker")}
        return {**grown, **{path: _read(metric) for path, metric in self._parts("Metric")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the states back, each on its metric's device."""
        if state and not any(isinstance(item, dict) for item in state.values()):
            for module in self._modules().values():  # of an older release: a metric's own
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
    """Return True for an object of this class of torchmetrics."""
    found = getattr(sys.modules.get("torchmetrics"), kind, None)
    return isinstance(found, type) and isinstance(value, found)


def _grow(tracker: Any, length: int) -> None:
    """Give a tracker as many metrics as it had; a script may have added one for this epoch."""
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
