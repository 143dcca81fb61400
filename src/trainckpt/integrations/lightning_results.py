"""What self.log has summed up so far of an epoch, and the metrics that a module holds.

Lightning has no state_dict for the first, and torchmetrics leaves its states out of a state_dict
unless they were made persistent. Without them the means of the epoch a run was stopped in would
cover its second part only.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric, MetricCollection, MetricTracker

from trainckpt.integrations.lightning_needs import is_a, part_of
from trainckpt.state.kinds.model import kept_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
         "add_dataloader_idx", "dataloader_idx", "metric_attribute")  # fmt: skip
_COUNTS = ("_update_count", "_computed", "_forward_cache")
# What torchmetrics' own wrappers hold beside the states they were given.
_BESIDE = {"Running": ("_num_vals_seen",), "MinMaxMetric": ("min_val", "max_val")}


def read_results(results: Any) -> list[dict[str, Any]]:
    """Every logged value, with how it is reduced."""
    return [_read_result(key, result) for key, result in results.items()]


def write_results(trainer: Any, results: Any, saved: list[dict[str, Any]]) -> None:
    """Make the logged values anew; later calls of self.log go on with them."""
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
    state = {name: getattr(result, name) for name in (*_COUNTS, "has_reset")}
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


def mark_metrics(module: torch.nn.Module) -> None:
    """Say of the metrics inside a module that nothing of them is lost."""
    for part in module.modules():
        if isinstance(part, (Metric, MetricCollection)):
            kept_elsewhere(part)


class MetricState:
    """The torchmetrics inside modules; tracked under the name "metrics".

    Args:
        modules: Gives them by name; "" is the module that is trained. Asked each time, since
            callbacks may make theirs when training starts.
    """

    def __init__(self, modules: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        self._modules = modules
        for module in modules().values():
            mark_metrics(module)

    def state_dict(self) -> dict[str, Any]:
        """Every state of every metric, by its path."""
        for _, part in self._parts():
            if isinstance(part, MetricCollection):
                list(part.values(copy_state=False))  # those that share a state are brought up
        grown = {path: {"grown": len(tracker)} for path, tracker in self._trackers()}
        return {**grown, **{path: _read_metric(metric) for path, metric in self._metrics()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the states back, each on its metric's device."""
        for path, tracker in self._trackers():
            _grow(tracker, state.get(path, {}).get("grown", len(tracker)))
        for path, metric in self._metrics():
            for name, value in state.get(path, {}).items():
                setattr(metric, name, _on(metric.device, value))

    def _parts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in self._modules().items():
            yield from module.named_modules(prefix=name)

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        return ((path, part) for path, part in self._parts() if isinstance(part, Metric))

    def _trackers(self) -> list[tuple[str, MetricTracker]]:
        return [(path, part) for path, part in self._parts() if isinstance(part, MetricTracker)]


def _grow(tracker: MetricTracker, length: int) -> None:
    """Give a tracker as many metrics as it had; a script may have added one for this epoch."""
    while len(tracker) < length:
        tracker.increment()
    while len(tracker) > length:
        del tracker._modules[str(len(tracker) - 1)]


def _read_metric(metric: Metric) -> dict[str, Any]:
    beside = [name for kind, names in _BESIDE.items() if is_a(metric, kind) for name in names]
    names = (*metric._defaults, *_COUNTS, *(name for name in beside if hasattr(metric, name)))
    return {name: _plain(getattr(metric, name)) for name in names}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_on(device, item) for item in value]
    return value
