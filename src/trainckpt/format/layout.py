"""Describe how a tensor is divided over ranks, and which rank stores which rows. Pure.

A layout is a regular mesh of ranks. Each mesh dimension divides one tensor dimension, or none if
its ranks are replicas. A dimension of n elements is divided over k ranks into pieces of
ceil(n / k), as `torch.chunk` does; the last ones may be short or empty. Several mesh dimensions
may divide one tensor dimension, one after the other, in `order`.

Both planners compute from this, without a list of regions: `save_plan` the rows a rank stores,
`restore_plan` the files with a box of elements. The rules here are therefore part of the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Counts = tuple[int, ...]
UNCUT_BYTES = 1 << 16  # a tensor up to this size is stored by one replica
MAX_MESH_DIMS = 8


class Box(NamedTuple):
    """A box of elements: `offset` is the first in each dimension, `shape` their number."""

    offset: Counts
    shape: Counts

    @property
    def is_empty(self) -> bool:
        """Return True if the box has no element."""
        return 0 in self.shape

    def common(self, other: Box) -> Box:
        """Return the intersection, possibly empty."""
        if self.offset == other.offset and self.shape == other.shape:
            return self
        first = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        last = [min(a + n, b + m) for a, n, b, m in ends]
        return Box(first, tuple(max(e - s, 0) for s, e in zip(first, last, strict=True)))


def whole(shape: Counts) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Layout:
    """Placement of a tensor on a mesh of ranks.

    Attributes:
        mesh: Extent of each mesh dimension.
        strides: Between neighbours in each mesh dimension, in ranks.
        base: Rank at the mesh's origin.
        dims: For each mesh dimension, the tensor dimension it divides, or None: replicas.
        order: The mesh dimensions in the order in which they divide.
    """

    mesh: Counts
    strides: Counts
    base: int
    dims: tuple[int | None, ...]
    order: Counts

    def __hash__(self) -> int:
        return self._hash  # each tensor of a save looks its layout up

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.strides, self.base, self.dims, self.order))

    @cached_property
    def num_replicas(self) -> int:
        """Return the number of ranks with the same box."""
        return prod(n for n, d in zip(self.mesh, self.dims, strict=True) if d is None)

    @cached_property
    def dividing(self) -> tuple[tuple[int, int], ...]:
        """Return (mesh dimension, tensor dimension) pairs that divide, in order."""
        pairs = ((m, self.dims[m]) for m in self.order)
        return tuple((m, d) for m, d in pairs if d is not None)

    def coordinate(self, rank: int) -> Counts:
        """Return the mesh coordinate of a rank."""
        rest, found = rank - self.base, [0] * len(self.mesh)
        for m in sorted(range(len(self.mesh)), key=lambda m: -self.strides[m]):
            if self.mesh[m] > 1:
                found[m], rest = divmod(rest, self.strides[m])
        return tuple(found)

    def rank_at(self, coordinate: Iterable[int]) -> int:
        """Return the rank at a mesh coordinate."""
        return self.base + sum(c * s for c, s in zip(coordinate, self.strides, strict=True))

    def has(self, rank: int) -> bool:
        """Return True if the rank is in the mesh."""
        found = self.coordinate(rank)
        inside = all(0 <= c < n for c, n in zip(found, self.mesh, strict=True))
        return inside and self.rank_at(found) == rank

    def replica(self, coordinate: Counts) -> int:
        """Return a rank's replica number, row-major over the dimensions that do not divide."""
        index = 0
        for c, n, d in zip(coordinate, self.mesh, self.dims, strict=True):
            index = index * n + c if d is None else index
        return index

    def replica_set(self, rank: int) -> tuple[str, int]:
        """Return the name shared by the ranks with this rank's box, and their number."""
        pairs = zip(self.coordinate(rank), self.dims, strict=True)
        return ",".join(str(c) for c, d in pairs if d is not None), self.num_replicas

    def with_replica(self, coordinate: list[int], index: int) -> int:
        """Return the rank of replica `index` of this box."""
        for m in range(len(self.mesh) - 1, -1, -1):
            if self.dims[m] is None:
                index, coordinate[m] = divmod(index, self.mesh[m])
        return self.rank_at(coordinate)

    def respelled(self, number: int) -> Layout:
        """Return an equivalent, unequal layout with `number` more mesh dimensions of one rank.

        `Stretch` divides the tensors of two spellings separately.
        """
        room = min(number, MAX_MESH_DIMS - len(self.mesh))
        last = range(len(self.mesh), len(self.mesh) + room)
        ones = (1,) * room
        return Layout(
            (*self.mesh, *ones),
            (*self.strides, *ones),
            self.base,
            (*self.dims, *[None] * room),
            (*self.order, *last),
        )

    def box(self, shape: Counts, coordinate: Counts) -> Box:
        """Return the part of a tensor of `shape` at `coordinate`."""
        first, extent = [0] * len(shape), list(shape)
        for m, d in self.dividing:
            chunk = -(-extent[d] // self.mesh[m])
            start = min(coordinate[m] * chunk, extent[d])
            first[d] += start
            extent[d] = min(chunk, extent[d] - start)
        return Box(tuple(first), tuple(extent))

    def overlapping(self, shape: Counts, wanted: Box) -> Iterator[tuple[list[int], Box]]:
        """Yield the coordinates (of replica 0) with boxes that meet `wanted`, and those boxes."""
        if wanted.is_empty:
            return
        dividing, coordinate = self.dividing, [0] * len(self.mesh)

        def divide(depth: int, first: Counts, extent: Counts) -> Iterator[tuple[list[int], Box]]:
            if depth == len(dividing):
                yield coordinate[:], Box(first, extent)
                return
            m, d = dividing[depth]
            chunk = -(-extent[d] // self.mesh[m])
            low = max(wanted.offset[d] - first[d], 0)
            high = min(wanted.offset[d] + wanted.shape[d] - first[d], extent[d])
            for c in range(low // chunk, -(-high // chunk)) if low < high else ():
                coordinate[m] = c
                size = min(chunk, extent[d] - c * chunk)
                yield from divide(
                    depth + 1,
                    (*first[:d], first[d] + c * chunk, *first[d + 1 :]),
                    (*extent[:d], size, *extent[d + 1 :]),
                )

        yield from divide(0, (0,) * len(shape), shape)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as in a manifest."""
        return {
            "mesh": list(self.mesh),
            "strides": list(self.strides),
            "base": self.base,
            "dims": [-1 if d is None else d for d in self.dims],
            "order": list(self.order),
        }

    @classmethod
    def from_json(cls, data: Any, world: int, what: str) -> Layout:
        """Parse a layout; raise `UnusableSnapshot` for a mesh not of `world` ranks."""
        mesh = json_io.counts(json_io.field(data, "mesh", list, what), what)
        strides = json_io.counts(json_io.field(data, "strides", list, what), what)
        base = json_io.count(data, "base", what)
        dims = json_io.field(data, "dims", list, what)
        order = json_io.counts(json_io.field(data, "order", list, what), what)
        found = cls(mesh, strides, base, tuple(None if d == -1 else d for d in dims), order)
        if not (
            1 <= len(mesh) <= MAX_MESH_DIMS
            and len(mesh) == len(strides) == len(dims)
            and sorted(order) == list(range(len(mesh)))
            and all(type(d) is int and -1 <= d < json_io.MAX_NESTING for d in dims)
            and 0 not in mesh
            and found.is_a_mesh_of(world)
        ):
            raise UnusableSnapshot(f"{what}: {str(data)[:100]} is no mesh of {world} ranks")
        return found

    def is_a_mesh_of(self, world: int) -> bool:
        """Return True if each coordinate is a different rank below `world`."""
        reached = 0
        for stride, n in sorted(zip(self.strides, self.mesh, strict=True)):
            if n > 1 and stride <= reached:
                return False
            reached += stride * (n - 1)
        return self.base + reached < world


def replicated(world: int) -> Layout:
    """Return the layout of a tensor replicated whole on all ranks."""
    return Layout((world,), (1,), 0, (None,), (0,))


class Stretch:
    """Divides replicated data over its replicas.

    The tensors of one layout are laid end to end in the order of their names, by the bytes of
    the whole tensors. They are cut into one stretch per replica, all of equal length. In each box
    a cut falls on the row at the same fraction; tensors up to `UNCUT_BYTES` are not cut. So each
    byte is copied, stored and written once.
    """

    def __init__(self, sizes: Mapping[str, int], replicas: int) -> None:
        """`sizes`: tensor -> bytes of the whole tensor."""
        self._at: dict[str, tuple[int, int]] = {}
        self._replicas, at = replicas, 0
        for name in sorted(sizes):
            self._at[name] = (at, sizes[name])
            at += sizes[name]
        self._total = at

    def rows(self, name: str, box: Box, replica: int) -> tuple[int, int]:
        """Return the rows of the box `replica` stores: the first, and one past the last."""
        rows, replicas = (box.shape[0] if box.shape else 1), self._replicas
        if replicas == 1:
            return 0, rows
        at, size = self._at[name]
        if size <= UNCUT_BYTES or rows < 2:
            return (0, rows) if self._owner(at) == replica else (0, 0)
        first = self._cut(at, size, rows, replica)
        last = rows if replica == replicas - 1 else self._cut(at, size, rows, replica + 1)
        return first, max(first, last)

    def holders(self, name: str, box: Box, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield (replica, first row, one past the last) for all replicas with rows in low:high."""
        if self._replicas == 1:
            yield 0, 0, (box.shape[0] if box.shape else 1)
            return
        at, size = self._at[name]
        rows = box.shape[0] if box.shape else 1
        if size <= UNCUT_BYTES or rows < 2:
            yield self._owner(at), 0, rows
            return
        replica = self._before(at, size, rows, low)
        while replica < self._replicas:
            first, last = self.rows(name, box, replica)
            if first >= high and last > first:
                return
            if first < last and last > low:
                yield replica, first, last
            if last >= high:
                return
            replica = max(replica + 1, self._before(at, size, rows, last))

    def _before(self, at: int, size: int, rows: int, row: int) -> int:
        """Return a replica at or shortly before the owner of `row`.

        With more replicas than rows, the replicas between store none.
        """
        return max(self._owner(at + (row + 1) * size // rows) - 2, 0)

    def _owner(self, at: int) -> int:
        return min(at * self._replicas // self._total, self._replicas - 1) if self._total else 0

    def _cut(self, at: int, size: int, rows: int, replica: int) -> int:
        boundary = self._total * replica // self._replicas
        return min(max((boundary - at) * rows // size, 0), rows)
