"""Reuse what earlier captures found, where nothing has changed since.

`ModuleWalk`, below, proves that the modules of a model register the same tensors. The rest captures
the tensors of a model or optimizer as at the save before.

Names, nodes and groups of 10,000 small tensors take longer to make than to copy. `KnownTensors`
keeps those of the last capture. They hold for the next one if it has the same names in the same
order, and if each tensor lies in the same memory with the same type, shape and strides. Of a
sharded tensor, this rank's part does, and mesh and placements are the same too.

Subclasses, tied state and tensors without memory are captured anew at each save.
"""

from __future__ import annotations

import operator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainckpt.state.adapters import fsdp
from trainckpt.state.dtensor import PLAIN, is_sharded, position_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.state.captured import Captured


LEAST_BYTES = 64 << 10  # of a copy beside training; below, a copy is quicker than its bookkeeping


class KnownTensors:
    """The tensors of one part of the state, as at its last capture."""

    def __init__(self) -> None:
        self._block: TensorBlock | None = None

    def recall(
        self, out: Captured, structure: Sequence[list[Any]], sources: list[torch.Tensor]
    ) -> Any:
        """Add the sources as at the last `learn`, and return its result; None if any has changed.

        Args:
            out: Captures so far.
            structure: Lists of numbers and texts that the names follow from.
            sources: Live tensors.
        """
        block = self._block
        if block is None or (parts := block.same_parts(structure, sources)) is None:
            return None
        if not out.tensors.keys().isdisjoint(block.names):
            return None
        live = [s.detach() if s.requires_grad else s for s in parts]
        out.tensors.update(zip(block.names, live, strict=True))
        out.groups.update(block.groups)
        out.placed.update(block.placed)
        out.blocks.append(block)
        return block.result

    def learn(
        self,
        out: Captured,
        structure: Sequence[list[Any]],
        sources: list[torch.Tensor],
        *,
        before: int,
        result: Any,
    ) -> None:
        """Keep what a capture of these sources added to `out` after its first `before` tensors."""
        added = dict(islice(out.tensors.items(), before, None))
        is_known = len(added) == len(sources) and all(
            map(_is_as_captured, own_parts(sources), added.values())
        )
        self._block = None
        if is_known:
            self._block = TensorBlock(out, structure, sources, list(added), result)
            out.blocks.append(self._block)


class TensorBlock:
    """Tensors captured together, and the proof that a later capture is the same.

    Attributes:
        names: Of the tensors, in order.
        groups: Tensor name -> group.
        placed: Name of a sharded tensor -> its position.
        small: Names of those too small to be copied beside training.
        result: Nodes and other values made of them.
    """

    def __init__(
        self,
        out: Captured,
        structure: Sequence[list[Any]],
        sources: list[torch.Tensor],
        names: list[str],
        result: Any,
    ) -> None:
        self.names, self.result = names, result
        self.groups = {name: out.groups[name] for name in names if name in out.groups}
        self.placed = {name: out.placed[name] for name in names if name in out.placed}
        parts = own_parts(sources)
        self.small = frozenset(
            name for name, each in zip(names, parts, strict=True) if each.nbytes < LEAST_BYTES
        )
        self._structure = [list(each) for each in structure]
        self._types, self._facts = list(map(type, sources)), _facts(parts)
        self._placements = _placements(sources)

    def same_parts(
        self, structure: Sequence[list[Any]], sources: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Return this rank's parts if these are the same names and tensors as then, else None."""
        if list(map(type, sources)) != self._types or list(structure) != self._structure:
            return None
        try:
            parts = own_parts(sources)
            is_same = _facts(parts) == self._facts and _placements(sources) == self._placements
        except RuntimeError:  # a tensor without an address, such as a sparse one
            return None
        return parts if is_same else None


def own_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each tensor; a tensor that is not sharded is returned itself."""
    if PLAIN.issuperset(map(type, tensors)):
        return tensors
    held: list[Any] = list(tensors)
    with torch.no_grad():  # else each would become a node of a graph
        return [t.to_local() if is_sharded(t) else t for t in held]


def _placements(tensors: list[torch.Tensor]) -> list[tuple[object, ...]]:
    """Return what the positions of the sharded tensors follow from."""
    if PLAIN.issuperset(map(type, tensors)):
        return []
    return [position_facts(t) for t in tensors if is_sharded(t)]


def _facts(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """Return what nodes and regions of plain tensors follow from, and their addresses."""
    return [
        (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg())
        for t in tensors
    ]


def _is_as_captured(source: torch.Tensor, captured: torch.Tensor) -> bool:
    """Return True for a plain tensor captured as it is, at an address of its own."""
    return (
        type(source) in PLAIN
        and source.layout is torch.strided
        and not (source.is_complex() or source.is_quantized or source.is_meta or source.is_neg())
        and source.data_ptr() == captured.data_ptr()
        and (source.data_ptr() != 0 or not source.nbytes)  # its memory may be released
    )


# ---- walks of modules
#
# Walk the modules of a model once, and prove later that they register the same tensors.
#
# A walk takes microseconds a tensor, and a save or resume needs several. The proof reads the
# dictionaries of each module, and compares their keys, and their values by identity, in a tenth of
# that time.


# A class that answers one of these in a way of its own is walked each time.
_WALKS = ("named_parameters", "named_buffers", "named_modules", "modules", "_named_members")
_HELD = ("_parameters", "_buffers", "_modules")


class ModuleWalk:
    """The modules of a model, and all that they registered when they were walked.

    Attributes:
        found: Results of walks; as valid as the walk.
        can_be_proven: `is_current` can say so. Otherwise it may hold within one boundary.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, Any] = {}
        self._modules = list(module.modules())
        self.can_be_proven = not fsdp.units(module) and all(map(_walks_as_torch, self._modules))
        self._registered = _registered(self._modules) if self.can_be_proven else None

    def is_current(self) -> bool:
        """Return True if a new walk would find the same modules, names and tensors."""
        if (then := self._registered) is None:
            return False
        now = _registered(self._modules)
        return then[:-1] == now[:-1] and all(map(operator.is_, then[-1], now[-1]))


def _registered(modules: list[nn.Module]) -> tuple[list[Any], list[int], list[str], list[Any]]:
    """Return the buffers not persistent, the sizes of all dictionaries, their keys and values."""
    kinds = [kind for m in modules for kind in (m._parameters, m._buffers, m._modules)]
    return (
        [frozenset(module._non_persistent_buffers_set) for module in modules],
        list(map(len, kinds)),
        list(chain.from_iterable(kinds)),
        list(chain.from_iterable(map(_values, kinds))),
    )


_values = operator.methodcaller("values")


def _walks_as_torch(module: nn.Module) -> bool:
    """Return True for a module walked by torch's own methods. Those of TorchScript are not."""
    kind, held = type(module), vars(module)
    has_plain = all(isinstance(held.get(name), dict) for name in _HELD)
    return has_plain and not any(
        getattr(kind, name) is not getattr(nn.Module, name) or name in held for name in _WALKS
    )
