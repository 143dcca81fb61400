"""Differences between two snapshots: which tensors and values, and by how much.

Tensors are compared whole, one at a time, whatever layout each lies in; those of which each rank
has its own are compared rank by rank. What differs between any two runs is left out: the run's id,
names of snapshots and attempts, times, versions, and, between two places, tracked files. The parts
that DDP and FSDP2 keep for an open window only mean something in one layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.state.capture import DDP, FSDP
from trainckpt.state.kinds.tracked_file import PART as FILES
from trainckpt.state.values import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.lifecycle.reading.contents import Contents

ONLY_A, ONLY_B = "only in A", "only in B"
TYPE, SHAPE, VALUES = "type", "shape", "values"
_CHUNK = 1 << 22  # elements compared at once


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs.

    Attributes:
        name: Of the tensor.
        rank: Whose own it is; None: one for all.
        kind: `ONLY_A`, `ONLY_B`, `TYPE`, `SHAPE` or `VALUES`.
        differing: Elements that differ, of `elements`; only with `VALUES`.
        max_abs: Largest absolute difference of any element; may be nan or inf.
        detail: Types or shapes that differ.
    """

    name: str
    rank: int | None
    kind: str
    differing: int | None = None
    elements: int | None = None
    max_abs: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class ValueDifference:
    """One value that differs: its path, whose it is, and both spellings ("" where it is not)."""

    path: str
    rank: int | None
    a: str
    b: str


def tensor_differences(
    a: Contents,
    b: Contents,
    *,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[TensorDifference]:
    """Compare all tensors, by name.

    Args:
        a, b: Two snapshots, in any layouts.
        tolerance: Largest absolute difference that is none; None: every bit counts.
        progress: Is told each name before it is compared.
    """
    in_a, in_b = set(a.names), set(b.names)
    for name in sorted(in_a | in_b):
        progress(name)
        if name not in in_b:
            yield TensorDifference(name, None, ONLY_A)
        elif name not in in_a:
            yield TensorDifference(name, None, ONLY_B)
        else:
            yield from _of_one(a, b, name, tolerance)


def _of_one(
    a: Contents, b: Contents, name: str, tolerance: float | None
) -> Iterator[TensorDifference]:
    own_a, own_b = a.owners(name), b.owners(name)
    if not own_a and not own_b:
        yield from _compare(name, None, a.read(name), b.read(name), tolerance)
    elif not own_a or not own_b:  # one for all on one side: each rank's own should equal it
        for rank in own_a or own_b:
            yield from _compare(name, rank, a.read(name, rank), b.read(name, rank), tolerance)
    else:
        for rank in sorted({*own_a, *own_b}):
            if rank not in own_b:
                yield TensorDifference(name, rank, ONLY_A)
            elif rank not in own_a:
                yield TensorDifference(name, rank, ONLY_B)
            else:
                yield from _compare(name, rank, a.read(name, rank), b.read(name, rank), tolerance)


def _compare(
    name: str, rank: int | None, a: torch.Tensor, b: torch.Tensor, tolerance: float | None
) -> Iterator[TensorDifference]:
    if a.dtype != b.dtype:
        detail = f"{a.dtype} and {b.dtype}".replace("torch.", "")
        yield TensorDifference(name, rank, TYPE, detail=detail)
    elif a.shape != b.shape:
        yield TensorDifference(name, rank, SHAPE, detail=f"{list(a.shape)} and {list(b.shape)}")
    else:
        found = _count(a.contiguous().reshape(-1), b.contiguous().reshape(-1), tolerance)
        if found[0]:
            yield TensorDifference(name, rank, VALUES, found[0], a.numel(), found[1])


def _count(a: torch.Tensor, b: torch.Tensor, tolerance: float | None) -> tuple[int, float]:
    """How many elements differ, and the largest difference."""
    number, most = 0, 0.0
    for first in range(0, a.numel(), _CHUNK):
        x, y = a[first : first + _CHUNK], b[first : first + _CHUNK]
        bits_x, bits_y = x.view(torch.uint8), y.view(torch.uint8)
        if torch.equal(bits_x, bits_y):
            continue
        differs = (bits_x != bits_y).view(x.numel(), -1).any(1)
        x, y = x[differs], y[differs]
        apart = _apart(x, y)
        if tolerance is not None:
            alike = (apart <= tolerance) | (x == y) | (x.isnan() & y.isnan())
            apart = apart[~alike]
        number += apart.numel()
        if apart.numel():
            most = max(most, float(apart.max()), key=lambda v: math.inf if math.isnan(v) else v)
    return number, most


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How far, element by element."""
    if x.dtype in (torch.int64, torch.uint64):  # two that differ may be one in float64
        (high_x, low_x), (high_y, low_y) = _halves(x), _halves(y)
        return ((high_x - high_y) * 2.0**32 + (low_x - low_y)).abs()
    return (_wide(x) - _wide(y)).abs()


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits."""
    bits = tensor.view(torch.int64)
    high = bits >> 32
    high = high & 0xFFFFFFFF if tensor.dtype == torch.uint64 else high
    return _wide(high), _wide(bits & 0xFFFFFFFF)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# ---- values


def same_layout(a: Contents, b: Contents) -> bool:
    """Whether all tensors that both have lie over as many ranks in the same way."""
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    return a.manifest.world == b.manifest.world and all(
        ours[name].layout == theirs[name].layout for name in ours.keys() & theirs.keys()
    )


def left_out(a: Contents, b: Contents) -> set[str]:
    """Parts of the values that say nothing when these two are compared."""
    found = set() if same_layout(a, b) else {DDP, FSDP}
    return found if a.source.tier.url == b.source.tier.url else {*found, FILES}


def value_differences(a: Contents, b: Contents) -> list[ValueDifference]:
    """The cursors, and rank by rank, for the ranks that both have, all that is no tensor."""
    skip = left_out(a, b)
    ours, theirs = _flat(a.manifest.cursor.to_json()), _flat(b.manifest.cursor.to_json())
    found = list(_unequal({"cursor": ours}, {"cursor": theirs}, None))
    for rank in range(min(a.manifest.world, b.manifest.world)):
        trees = [
            {part: leaves(tree, part) for part, tree in each.values(rank).items()}
            for each in (a, b)
        ]
        for part in skip:
            trees[0].pop(part, None)
            trees[1].pop(part, None)
        found += _unequal(trees[0], trees[1], rank)
    return found


def _flat(cursor: dict[str, int]) -> dict[str, str]:
    return {f"cursor.{key}": str(value) for key, value in cursor.items()}


def _unequal(a: dict[str, Any], b: dict[str, Any], rank: int | None) -> Iterator[ValueDifference]:
    for part in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(part, {}), b.get(part, {})
        for path in sorted(ours.keys() | theirs.keys()):
            then, now = ours.get(path, ""), theirs.get(path, "")
            if then != now:
                yield ValueDifference(path, rank, then, now)
