"""Reuse the previous save's plan of stored regions while nothing in it changes.

To plan thousands of regions takes longer than to see that names, types, shapes and replicas are the
same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.format.manifest import RANK, SPLIT, TensorEntry
from trainckpt.snapshot.save_plan import plan_save
from trainckpt.state import replicas, staging
from trainckpt.state.stored_values import add_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.shard_file import Region
    from trainckpt.state.captured import Captured


class CachedSavePlan(NamedTuple):
    """Save plan of one rank.

    Attributes:
        regions: Regions this rank stores.
        entries: Manifest entry of each tensor it holds.
    """

    regions: tuple[Region, ...]
    entries: dict[str, TensorEntry]


class SavePlanCache:
    """Plan cache of one rank of an attempt, across saves."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._facts: Any = None
        self._plan = CachedSavePlan((), {})

    def plan(self, captured: Captured, equal: Sequence[str]) -> CachedSavePlan:
        """Return the plan for this state, and add its values to it as one tensor.

        Args:
            captured: All state of this rank.
            equal: Groups of tensors with equal replicas.
        """
        add_values(captured)
        facts = (
            [(name, tensor.dtype, tensor.shape) for name, tensor in captured.tensors.items()],
            captured.groups,
            captured.apart,
            captured.placed,
            equal,
        )
        if facts != self._facts:
            self._plan, self._facts = self._make(captured, equal), facts
        return self._plan

    def _make(self, captured: Captured, equal: Sequence[str]) -> CachedSavePlan:
        layouts = replicas.split_layouts(captured, set(equal), self._world)
        regions = staging.held(captured, layouts)
        entries = {
            r.tensor: TensorEntry(
                r.dtype, r.of, SPLIT if r.tensor in layouts else RANK, layouts.get(r.tensor)
            )
            for r in regions
        }
        return CachedSavePlan(plan_save(regions, layouts, rank=self._rank), entries)
