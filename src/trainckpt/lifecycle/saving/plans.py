"""Plans: what a rank stores of its state, as the save before decided it wherever nothing differs.

To plan thousands of regions takes longer than to see that names, types, shapes and replicas are as
they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.format.manifest import RANK, SPLIT, TensorEntry
from trainckpt.snapshot.save_plan import plan_save
from trainckpt.state import replicas, stage
from trainckpt.state.stored_values import add_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.shard_file import Region
    from trainckpt.state.captured import Captured


class Plan(NamedTuple):
    """Of one rank.

    Attributes:
        regions: What it stores.
        entries: Of each tensor it holds, what the manifest says.
    """

    regions: tuple[Region, ...]
    entries: dict[str, TensorEntry]


class Plans:
    """Of one rank of an attempt, save after save."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._facts: Any = None
        self._plan = Plan((), {})

    def plan(self, captured: Captured, equal: Sequence[str]) -> Plan:
        """The plan for this state, whose values become a tensor of it.

        Args:
            captured: All of this rank.
            equal: Groups of tensors whose replicas are equal.
        """
        add_values(captured)
        facts = (
            [(name, tensor.dtype, tensor.shape) for name, tensor in captured.tensors.items()],
            captured.groups, captured.apart, captured.placed, equal,
        )  # fmt: skip
        if facts != self._facts:
            self._plan, self._facts = self._new(captured, equal), facts
        return self._plan

    def _new(self, captured: Captured, equal: Sequence[str]) -> Plan:
        layouts = replicas.split_layouts(captured, set(equal), self._world)
        regions = stage.held(captured, layouts)
        entries = {
            r.tensor: TensorEntry(
                r.dtype, r.of, SPLIT if r.tensor in layouts else RANK, layouts.get(r.tensor)
            )
            for r in regions
        }
        return Plan(plan_save(regions, layouts, rank=self._rank), entries)
