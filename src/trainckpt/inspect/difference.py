"""Compare two snapshots: the tensors and values that differ, and by how much.

Tensors are compared whole, one at a time, across layouts; unsharded ones of each rank are compared
rank by rank. Expected differences between any two runs are left out: the run's id, names of
snapshots and attempts, times, versions, and, between two places, tracked files. The parts that DDP
and FSDP2 keep for an open window only mean something in one layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.state.adapters.tracked_file import PART as FILES
from trainckpt.state.adapters.tracked_run import PART as RUNS
from trainckpt.state.capture import DDP, FSDP
from trainckpt.state.values import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.inspect.contents import Contents

ONLY_A, ONLY_B = "only in A", "only in B"
TYPE, SHAPE, VALUES = "type", "shape", "values"
_CHUNK = 1 << 22  # elements compared at once


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs.

    Attributes:
        name: Name of the tensor.
        rank: Owner of the tensor; None: one for all.
        kind: `ONLY_A`, `ONLY_B`, `TYPE`, `SHAPE` or `VALUES`.
        differing: Differing elements, of `elements`; only with `VALUES`.
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
    """One value that differs: its path, its rank, and both spellings ("" for a missing one)."""

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
        tolerance: Largest absolute difference to ignore; None: every bit counts.
        progress: Called with each name before its comparison.
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
            yield TensorDifference(
                name, rank, VALUES, differing=found[0], elements=a.numel(), max_abs=found[1]
            )


def _count(a: torch.Tensor, b: torch.Tensor, tolerance: float | None) -> tuple[int, float]:
    """Return the number of differing elements, and the largest difference."""
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
    """Return the absolute difference, element by element."""
    if x.dtype in (torch.int64, torch.uint64):  # different values may be equal in float64
        (high_x, low_x), (high_y, low_y) = _halves(x), _halves(y)
        return ((high_x - high_y) * 2.0**32 + (low_x - low_y)).abs()
    return (_wide(x) - _wide(y)).abs()


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower 32 bits."""
    bits = tensor.view(torch.int64)
    high = bits >> 32
    high = high & 0xFFFFFFFF if tensor.dtype == torch.uint64 else high
    return _wide(high), _wide(bits & 0xFFFFFFFF)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# ---- values


def left_out(a: Contents, b: Contents) -> set[str]:
    """Return the parts of the values that are meaningless in this comparison."""
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    is_same_layout = a.manifest.world == b.manifest.world and all(
        ours[name].layout == theirs[name].layout for name in ours.keys() & theirs.keys()
    )
    found = set() if is_same_layout else {DDP, FSDP}
    return found if a.source.tier.url == b.source.tier.url else {*found, FILES, RUNS}


def value_differences(a: Contents, b: Contents) -> list[ValueDifference]:
    """Compare the cursors, and rank by rank all values of the common ranks."""
    skip = left_out(a, b)
    cursor_a, cursor_b = (
        {f"cursor.{key}": str(value) for key, value in each.manifest.cursor.to_json().items()}
        for each in (a, b)
    )
    found = list(_unequal({"cursor": cursor_a}, {"cursor": cursor_b}, None))
    for rank in range(min(a.manifest.world, b.manifest.world)):
        ours, theirs = (
            {p: leaves(tree, p) for p, tree in each.values(rank).items() if p not in skip}
            for each in (a, b)
        )
        found += _unequal(ours, theirs, rank)
    return found


def _unequal(a: dict[str, Any], b: dict[str, Any], rank: int | None) -> Iterator[ValueDifference]:
    for part in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(part, {}), b.get(part, {})
        for path in sorted(ours.keys() | theirs.keys()):
            then, now = ours.get(path, ""), theirs.get(path, "")
            if then != now:
                yield ValueDifference(path, rank, then, now)
