"""Decide the box of each saved tensor to read on this rank, and its layout in the live state.

The live objects decide: optimizer state is sharded like its parameter now. The restore is exact if
every model tensor has its saved layout, on as many ranks. Then all state is this rank's own,
including the open window's gradients. Otherwise a donor rank gives the values, and state of the
window is not restored: the window begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.layout import Box, replicated, whole
from trainckpt.state import dtensor
from trainckpt.state.adapters import deepspeed_engine, fsdp, gradients
from trainckpt.state.adapters.partitioned_optimizer import filled, is_divided, rows_of
from trainckpt.state.capture import DDP, FSDP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from trainckpt.format.layout import Layout
    from trainckpt.format.manifest import TensorEntry
    from trainckpt.state.adapters.optimizer import OptimizerState
    from trainckpt.state.registry import Registry

    Wrap = Callable[[torch.Tensor], torch.Tensor]

CANNOT_BE_DIVIDED = "is another one on each rank, so it cannot be divided anew"
OF_THE_WINDOW = frozenset({gradients.PART, FSDP, DDP, deepspeed_engine.WINDOW})


@dataclass
class Targets:
    """The boxes to read.

    Attributes:
        exact: Every tensor has its saved layout.
        wanted: Tensor -> box of the whole as stored; None: all of it.
        wraps: Tensor -> function from the restored tensor to the sharded one.
        lengths: Tensor -> length of this rank's partition now, for those of DeepSpeed's.
        problems: Tensors with no place in the live state, one sentence each.
    """

    exact: bool
    wanted: dict[str, Box | None] = field(default_factory=dict)
    wraps: dict[str, Wrap] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def filled(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors read, partitions with the zeros that they have at their end now."""
        return tensors | {n: filled(tensors[n], length) for n, length in self.lengths.items()}

    def want_rows(self, name: str, part: torch.Tensor, entry: TensorEntry) -> None:
        """Request the rows of a partition."""
        rank, length = torch.distributed.get_rank(), part.numel()
        self.wanted[name], self.lengths[name] = rows_of(rank, length, entry.shape[0]), length

    def want(self, name: str, tensor: torch.Tensor, entry: TensorEntry) -> None:
        """Request the saved data of a live tensor: the part on this rank."""
        if entry.layout is None and not self.exact and dtensor.is_sharded(tensor):
            self.problems.append(f"{name} {CANNOT_BE_DIVIDED}")
        self.lies(name, entry, _live_layout(tensor, entry), tuple(tensor.shape))

    def lies(
        self, name: str, entry: TensorEntry, layout: Layout | None, shape: tuple[int, ...]
    ) -> None:
        """Request this rank's part of a tensor of `shape`; without a layout, all of it."""
        self.wanted[name] = None
        if layout is not None:
            box = layout.box(shape, layout.coordinate(torch.distributed.get_rank()))
            self.wanted[name] = _as_stored(box, entry)


def find_targets(
    registry: Registry,
    values: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    *,
    world: int,
    then: int,
) -> Targets:
    """Decide the boxes this rank reads.

    Args:
        registry, values, entries: The live objects, the donor's values, the snapshot's tensors.
        world, then: Number of ranks now, and in the snapshot.
    """
    live = {name: t for model in registry.models for name, t in model.tensors().items()}
    exact = world == then and all(
        _lies_as_it_did(tensor, entries[name], world)
        for name, tensor in live.items()
        if name in entries
    )
    units = values.get(FSDP)
    if isinstance(units, dict):
        for model in registry.models:
            tree = units.get(model.name)
            exact = exact and not fsdp.differences(model.wrapped, model.name, tree)
    engines = values.get(deepspeed_engine.PART)
    exact = exact and all(engine.is_as_saved(engines) for engine in registry.engines)
    found = Targets(exact)
    for name, tensor in live.items():
        if name in entries and _fits(tensor, entries[name]):
            found.want(name, tensor, entries[name])
    for name in {n for model in registry.models for n in model.owners()} & entries.keys():
        layout = entries[name].layout
        if name not in found.wanted and (layout is None or not layout.dividing):
            found.lies(name, entries[name], None, ())  # a forward made it: see `adapters.model`
    seek = _TargetFinder(registry, entries, found)
    for optimizer in registry.optimizers:
        seek.optimizer(optimizer, values.get(optimizer.name), registry.parameter_names())
    named = {optimizer.name for optimizer in registry.optimizers}
    for part, tree in values.items():
        if part not in named and (exact or part not in OF_THE_WINDOW):
            for node in _nodes(tree):
                seek.node(node, None)
    return found


class _TargetFinder:
    """Finds the target of every tensor node in the values."""

    def __init__(
        self, registry: Registry, entries: Mapping[str, TensorEntry], found: Targets
    ) -> None:
        self._entries = entries
        self._found = found
        self._of_models = registry.model_parameters()
        self._meshes: dict[str, DeviceMesh] = {}
        for tensor in registry.all_parameters():
            if dtensor.is_sharded(tensor):
                mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
                self._meshes[dtensor.mesh_key(mesh)] = mesh

    def optimizer(self, optimizer: OptimizerState, tree: Any, names: Mapping[int, str]) -> None:
        """Give the state of every parameter the layout of the parameter now."""
        if not isinstance(tree, dict):
            return
        parameters = {name: p for p, name in optimizer.named(names)}
        parameters = {**self._of_models, **parameters}  # some may be in groups still to be added
        state = tree.get("state")
        for name, items in state.items() if isinstance(state, dict) else ():
            for node in _nodes(items):
                if not (optimizer.is_partitioned and self._rows(node, parameters.get(name))):
                    self.node(node, parameters.get(name))
                    if optimizer.is_partitioned and not self._found.exact:
                        self._must_be_a_step(node)
        for key, part in tree.items():
            for node in _nodes(part) if key != "state" else ():
                self.node(node, None)
        for name, parameter in optimizer.untracked(names).items():
            if optimizer.is_partitioned and self._rows({"$tensor": name}, parameter):
                continue
            if name in self._entries and _fits(parameter, self._entries[name]):
                self._found.want(name, parameter, self._entries[name])

    def _must_be_a_step(self, node: dict[str, Any]) -> None:
        """Refuse, for another number of ranks, state of a partition that lies along none of its
        elements, such as scales of blocks: only the count of steps is the same on all ranks."""
        name = node.get("$tensor")
        if isinstance(name, str) and not name.endswith("/step"):
            self._found.problems.append(f"{name} {CANNOT_BE_DIVIDED}")

    def _rows(self, node: dict[str, Any], part: torch.Tensor | None) -> bool:
        """Add the target of a tensor stored as partitions; False if it is stored otherwise."""
        entry = self._entries.get(node["$tensor"]) if isinstance(node["$tensor"], str) else None
        if part is None or entry is None or not is_divided(entry):
            return False
        self._found.want_rows(node["$tensor"], part, entry)
        return True

    def node(self, node: dict[str, Any], parameter: torch.Tensor | None) -> None:
        """Add the target of one stored tensor."""
        _check(node)
        for part in node.get("parts", ()):
            self._entry(part)
            self._found.wanted[part] = None
        if "parts" in node:
            return
        name, entry = node["$tensor"], self._entry(node["$tensor"])
        described, wrap = node.get("sharded"), None
        shape = tuple(described["shape"]) if described else entry.shape
        layout: Layout | None = None
        alike = parameter is not None and shape == tuple(parameter.shape) and len(shape) > 0
        if self._found.exact:
            layout, wrap = self._as_it_was(described, entry, name)
        elif alike and parameter is not None and dtensor.is_sharded(parameter):
            layout, wrap = _live_layout(parameter, entry), _like(parameter)
        elif described and parameter is not None and dtensor.is_sharded(parameter):
            wrap = _replicated_like(parameter)
        elif described and parameter is None:
            layout, wrap = self._as_it_was(described, entry, name)
        if described and entry.layout is None and not self._found.exact:
            self._found.problems.append(f"{name} {CANNOT_BE_DIVIDED}")
        self._found.lies(name, entry, layout, shape)
        if wrap is not None:
            self._found.wraps[name] = wrap

    def _as_it_was(
        self, described: Any, entry: TensorEntry, name: str
    ) -> tuple[Layout | None, Wrap | None]:
        if not described:
            return None, None
        mesh = self._meshes.get(described["mesh"])
        if mesh is None:
            self._found.problems.append(
                f"{name} is sharded over the mesh {described['mesh']!r}, which no parameter has now"
            )
            return None, None
        if len(described["placements"]) != mesh.ndim:
            raise UnusableSnapshot(f"{name[:100]} is not sharded as its mesh {described['mesh']}")
        layout = dtensor.layout_said(described, mesh) if entry.layout else None
        dims = layout.dims if layout else ()
        if any(d is not None and d >= len(described["shape"]) for d in dims):
            raise UnusableSnapshot(f"{name[:100]} has no dimension that is sharded")
        return layout, lambda held: dtensor.rebuild(held, mesh, described)

    def _entry(self, name: Any) -> TensorEntry:
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None:
            raise UnusableSnapshot(f"the tensor {str(name)[:100]} is missing from the snapshot")
        return entry


def _check(node: dict[str, Any]) -> None:
    """Raise `UnusableSnapshot` unless the fields besides the name are readable."""
    what, described = f"the tensor {str(node['$tensor'])[:100]}", node.get("sharded")
    if "parts" in node:
        json_io.field(node, "parts", list, what)
    if described is not None:
        json_io.field(described, "mesh", str, what)
        json_io.field(described, "placements", list, what)
        for key in ("shape", "stride"):
            json_io.counts(json_io.field(described, key, list, what), what)


def _like(pattern: torch.Tensor) -> Wrap:
    return lambda held: dtensor.like(held, pattern)


def _replicated_like(pattern: torch.Tensor) -> Wrap:
    return lambda held: dtensor.replicate(held, pattern)


def _lies_as_it_did(tensor: torch.Tensor, entry: TensorEntry, world: int) -> bool:
    if entry.layout is None:
        return True  # each rank's own, whatever that is
    if dtensor.is_sharded(tensor):
        return dtensor.layout_of(tensor) == entry.layout
    return entry.layout == replicated(world)


def _fits(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """Return True if the shapes agree; the saved one is unknown for each rank's own tensors."""
    if entry.layout is None:
        return True
    return _as_stored(whole(tuple(tensor.shape)), entry).shape == entry.shape


def _as_stored(box: Box, entry: TensorEntry) -> Box:
    """Return the box as stored: a type stored as bytes has one dimension more."""
    if len(entry.shape) != len(box.shape) + 1:
        return box
    return Box((*box.offset, 0), (*box.shape, entry.shape[-1]))


def _live_layout(tensor: torch.Tensor, entry: TensorEntry) -> Layout | None:
    """Return the layout of a live tensor; None: this rank needs all of the saved data."""
    if not dtensor.is_sharded(tensor) or entry.layout is None:
        return None
    return dtensor.layout_of(tensor)


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every tensor node of an encoded tree."""
    todo = [tree]
    while todo:
        item = todo.pop()
        if isinstance(item, dict) and "$tensor" in item:
            yield item
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list):
            todo += item
