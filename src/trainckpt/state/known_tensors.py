"""Capture the tensors of a model or optimizer as at the save before, where nothing has changed.

Names, nodes and groups of 10,000 small tensors take longer to make than to copy. `KnownTensors`
keeps those of the last capture. They hold for the next one if it has the same names in the same
order, and if each tensor lies in the same memory with the same type, shape and strides.

Sharded tensors, subclasses, tied state and tensors without memory are captured anew at each save.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.state.dtensor import PLAIN

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
        if block is None or not block.holds(structure, sources):
            return None
        if not out.tensors.keys().isdisjoint(block.names):
            return None
        live = [s.detach() if s.requires_grad else s for s in sources]
        out.tensors.update(zip(block.names, live, strict=True))
        out.groups.update(block.groups)
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
        is_known = (
            len(added) == len(sources)
            and out.placed.keys().isdisjoint(added)
            and all(map(_is_as_captured, sources, added.values()))
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
        self.small = frozenset(
            name for name, each in zip(names, sources, strict=True) if each.nbytes < LEAST_BYTES
        )
        self._structure = [list(each) for each in structure]
        self._types, self._facts = list(map(type, sources)), _facts(sources)

    def holds(self, structure: Sequence[list[Any]], sources: list[torch.Tensor]) -> bool:
        """Return True if these are the same names and tensors as then."""
        if list(map(type, sources)) != self._types or list(structure) != self._structure:
            return False
        try:
            return _facts(sources) == self._facts
        except RuntimeError:  # a tensor without an address, such as a sparse one
            return False


def _facts(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """Return what nodes and regions of plain tensors follow from, and their addresses."""
    return [
        (t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad, t.is_neg()) for t in tensors
    ]


def _is_as_captured(source: torch.Tensor, captured: torch.Tensor) -> bool:
    """Return True for a plain tensor captured as it is, at an address of its own."""
    return (
        type(source) in PLAIN
        and source.layout is torch.strided
        and not (source.is_complex() or source.is_quantized or source.is_meta or source.is_neg())
        and source.nbytes > 0
        and source.data_ptr() == captured.data_ptr()
    )
