"""Capture and restore an optimizer whose parameters are partitions, as ZeRO-1 and 2 make them.

DeepSpeed lays the parameters of a group one behind the other, fills up with zeros, and divides the
whole into equal parts, one a rank. Torch's optimizer steps this rank's part in fp32. So part and
moments are stored as one-dimensional tensors divided over the ranks. Another number of ranks reads
other rows of them: only the zeros at the end differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.format.layout import Box, Layout
from trainckpt.state.adapters.optimizer import OptimizerState
from trainckpt.state.captured import Placed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.manifest import TensorEntry
    from trainckpt.state.adapters.deepspeed_engine import EngineState
    from trainckpt.state.captured import Captured, Saved

_PLACES = "places"


class PartitionedOptimizerState(OptimizerState):
    """The optimizer of one DeepSpeed engine."""

    is_partitioned = True

    def __init__(self, name: str, engine: EngineState) -> None:
        super().__init__(name, engine.inner)
        self._engine = engine

    def capture(self, out: Captured, names: Mapping[int, str]) -> None:
        """Add groups and state, and the place of each parameter in its group's partitions."""
        super().capture(out, names)
        flats = {name: parameter for parameter, name in self.named(names)}
        nodes = [
            (flats[owner], tree)
            for owner, items in out.values[self.name]["state"].items()
            for _, tree in items
        ]
        nodes += [(flat, {"$tensor": name}) for name, flat in flats.items()]
        for flat, tree in nodes:
            name = tree.get("$tensor") if isinstance(tree, dict) else None
            if name in out.tensors and out.tensors[name].shape == flat.shape:
                out.placed[name] = _placed(flat.numel())
        out.values[self.name][_PLACES] = self._places(names)

    def differences(self, saved: Saved, names: Mapping[int, str]) -> list[str]:
        """Return the differences: parameters elsewhere in the partitions, or those of any one."""
        then, now = saved.values[self.name].get(_PLACES), self._places(names)
        if then is None:
            return [f"{self.name} was no optimizer of DeepSpeed's ZeRO-1 or 2"]
        if then == now:
            return super().differences(saved, names)
        if not isinstance(then, list) or len(then) != len(now):
            return [f"{self.name} had {len(then)} parameter groups, has {len(now)}"]
        found = []
        for i, (old, new) in enumerate(zip(then, now, strict=True)):
            gone, added = _only_in(old, new), _only_in(new, old)
            if gone or added:
                how = f"lost {gone[:3]}, gained {added[:3]}"
            else:
                how = (
                    "lays its parameters in another order, as round_robin_gradients does for "
                    "another number of ranks, or parameter_alignment"
                )
            if old != new:
                found.append(f"{self.name}: parameter group {i} {how}")
        return found

    def apply(self, saved: Saved, names: Mapping[int, str]) -> None:
        """Restore partitions, groups and state."""
        super().apply(saved, names)
        self._engine.link()

    def _places(self, names: Mapping[int, str]) -> list[list[list[Any]]]:
        """Return name, first element and number of elements of each parameter, group by group."""
        return [
            [[names.get(id(p), ""), first, p.numel()] for p, first in places]
            for places in self._engine.places()
        ]


def rows_of(rank: int, length: int, total: int) -> Box:
    """Return the rows of `total` stored ones in a rank's part of this length; zeros follow them."""
    first = min(rank * length, total)
    return Box((first,), (min(length, total - first),))


def is_divided(entry: TensorEntry) -> bool:
    """Return True for a tensor stored as this module stores partitions."""
    return len(entry.shape) == 1 and entry.layout is not None and bool(entry.layout.dividing)


def filled(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return these rows, and zeros up to this length."""
    if rows.numel() == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - rows.numel())])


def _placed(length: int) -> Placed:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    layout = Layout((world,), (1,), 0, (0,), (0,))
    shape = (world * length,)
    return Placed(layout, shape, layout.box(shape, layout.coordinate(rank)))


def _only_in(places: Any, others: Any) -> list[str]:
    """Return the parameters of one group that the other lacks, or has in another size."""
    there = {(name, count) for name, _, count in others}
    return [name for name, _, count in places if (name, count) not in there]
