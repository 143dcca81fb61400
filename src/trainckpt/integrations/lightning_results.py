"""What self.log has summed up so far of an epoch.

Lightning has no state_dict for it. Without it the means of the epoch a run was stopped in would
cover its second part only.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from trainckpt.integrations.lightning_needs import part_of
from trainckpt.state.kinds.metric import COUNTS

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
         "add_dataloader_idx", "dataloader_idx", "metric_attribute")  # fmt: skip


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
