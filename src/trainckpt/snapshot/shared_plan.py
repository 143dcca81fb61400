"""The plan of a shared read: who of the ranks that want columns of the same rows reads what. Pure.

Digests lie over runs of row-major bytes. A rank that holds some columns of a matrix, as row-wise
tensor parallelism does, would read and verify whole rows of it, many times the bytes it needs. But
the ranks that hold the other columns of those rows want the rest: together they want whole rows.
So they read them once between them, and each sends every other what that one holds.

    group     the ranks that differ only in where they lie along dimensions 1 and up: together
              they want whole rows
    run       what a group wants of one region: whole rows of it, one run of bytes
    share     all runs of a tensor, end to end, are cut into one share a member, as large as what
              that member wants of the tensor; a cut falls between two digest blocks
    piece     what a member reads at a time: a part of its share, in one region

Every member computes this for itself from the manifest and the layout the tensors have now, and all
come to the same; that they do is compared (`Group.digest`) before anybody relies on it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.format import shard_file, strict
from trainckpt.format.digest import digest
from trainckpt.format.layout import Box
from trainckpt.format.shard_file import ITEM_BYTES
from trainckpt.snapshot.restore_plan import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainckpt.format.layout import Counts, Layout
    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.snapshot.restore_plan import Planner

MAX_MEMBERS = 256  # of a group; a larger one would send more messages than it saves bytes
WORTH = 1.02  # a tensor is shared if some member alone would read more than that times its part
PIECE_BYTES = 16 << 20
TURNS = 40503, 65536  # n times the one modulo the other is spread evenly for n = 0, 1, 2...


class Run(NamedTuple):
    """What a group wants of one region.

    Attributes:
        file: Number of the file that holds the region.
        region: Its box.
        first, last: The wanted bytes of it: the first, and the one behind the last.
        block: Bytes under one digest.
        before: Bytes of the tensor's runs before this one.
    """

    file: int
    region: Box
    first: int
    last: int
    block: int
    before: int


class Piece(NamedTuple):
    """Bytes `first` to `last` of a region, read at once by one member."""

    tensor: SharedTensor
    run: Run
    first: int
    last: int

    def parts(self, box: Box) -> Iterator[Box]:
        """What of the piece lies in `box`, as boxes of the whole tensor."""
        item = ITEM_BYTES[self.tensor.entry.dtype]
        region = self.run.region
        for flat in stretch_boxes(region.shape, self.first // item, self.last // item):
            offset = tuple(a + b for a, b in zip(flat.offset, region.offset, strict=True))
            common = Box(offset, flat.shape).common(box)
            if not common.is_empty:
                yield common


@dataclass(frozen=True)
class SharedTensor:
    """One tensor that a group reads together.

    Attributes:
        name: Of the tensor.
        entry: In the manifest.
        boxes: What each member wants of it.
        runs: What all together want.
        turn: Spreads what rounding to blocks gives to some members and not to others.
    """

    name: str
    entry: TensorEntry
    boxes: tuple[Box, ...]
    runs: tuple[Run, ...]
    turn: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all runs."""
        last = self.runs[-1]
        return last.before + last.last - last.first

    def share(self, member: int) -> Iterator[Piece]:
        """What one member reads, in pieces."""
        sizes = [shard_file.num_bytes(box.shape, self.entry.dtype) for box in self.boxes]
        begin = sum(sizes[:member])
        number, at = self._cut(begin)
        last_run, end = self._cut(begin + sizes[member])
        while number <= last_run and number < len(self.runs):
            run = self.runs[number]
            stop = end if number == last_run else run.last
            step = max(PIECE_BYTES // run.block, 1) * run.block
            while at < stop:
                following = min((at // step + 1) * step, stop)
                yield Piece(self, run, at, following)
                at = following
            number += 1
            at = self.runs[number].first if number < len(self.runs) else 0

    def _cut(self, position: int) -> tuple[int, int]:
        """(run, byte of its region) of the cut nearest to a position in all runs.

        The cuts of one tensor are all rounded in the same way, so they keep their order.
        """
        if position <= 0:
            return 0, self.runs[0].first
        if position >= self.num_bytes:
            return len(self.runs), 0
        number = bisect_right(self.runs, position, key=lambda run: run.before) - 1
        run = self.runs[number]
        at = run.first + position - run.before
        up = run.block * (self.turn * TURNS[0] % TURNS[1]) // TURNS[1]
        rounded = (at + up) // run.block * run.block
        return number, min(max(rounded, run.first), run.last)


@dataclass(frozen=True)
class Group:
    """Ranks that read tensors together, and which tensors.

    Attributes:
        members: Ranks, ascending.
        me: Which of them this rank is.
        tensors: In the order in which they are read.
        digest: Of all of this; equal on all members if they mean the same.
    """

    members: Counts
    me: int
    tensors: tuple[SharedTensor, ...]
    digest: str

    @property
    def key(self) -> str:
        """Names the group among all groups of the world."""
        return digest(strict.canonical(list(self.members)))

    def rounds(self) -> Iterator[list[list[Piece]]]:
        """What each member reads in each round: no more than `PIECE_BYTES`, or one block."""
        batch: list[SharedTensor] = []
        size = 0
        for tensor in self.tensors:
            batch.append(tensor)
            size += tensor.num_bytes
            if size >= PIECE_BYTES * len(self.members):
                yield from self._rounds(batch)
                batch, size = [], 0
        yield from self._rounds(batch)

    def _rounds(self, batch: list[SharedTensor]) -> Iterator[list[list[Piece]]]:
        members = range(len(self.members))
        loads = [_loads(p for tensor in batch for p in tensor.share(m)) for m in members]
        for number in range(max(map(len, loads))):
            yield [load[number] if number < len(load) else [] for load in loads]


class Sharing:
    """Finds what this rank reads together with others."""

    def __init__(self, manifest: Manifest, planner: Planner, rank: int) -> None:
        self._manifest, self._planner, self._rank = manifest, planner, rank
        self._members: dict[Layout, Counts] = {}
        self._boxes: dict[tuple[Layout, Counts], tuple[Box, ...]] = {}
        self._met: dict[tuple[int, Layout, Counts, str], tuple[Run, ...] | None] = {}

    def groups(
        self, wanted: Mapping[str, Box | None], layouts: Mapping[str, Layout]
    ) -> tuple[Group, ...]:
        """The groups that this rank is in, in an order that is the same for all ranks.

        Args:
            wanted: Tensor -> box that this rank wants of it.
            layouts: Tensor -> how it lies over the ranks now, of those that are divided.
        """
        found: dict[Counts, list[SharedTensor]] = {}
        for name in sorted(name for name, layout in layouts.items() if any(layout.dims)):
            members = self._members_of(layouts[name])
            if 1 < len(members) <= MAX_MEMBERS:
                shared = self._shared(name, wanted.get(name), layouts[name], members)
                if shared is not None:
                    tensors = found.setdefault(members, [])
                    tensors.append(replace(shared, turn=len(tensors)))
        return tuple(
            Group(members, members.index(self._rank), tuple(of), _digest(of, layouts))
            for members, of in sorted(found.items())
        )

    def _members_of(self, layout: Layout) -> Counts:
        """This rank and those that differ from it only in the columns they hold, ascending."""
        if layout not in self._members:
            coordinate = layout.coordinate(self._rank)
            found = [layout.rank_at(coordinate)]
            for m, (n, d) in enumerate(zip(layout.mesh, layout.dims, strict=True)):
                if d and len(found) <= MAX_MEMBERS:
                    steps = [(c - coordinate[m]) * layout.strides[m] for c in range(n)]
                    found = [rank + step for rank in found for step in steps]
            self._members[layout] = tuple(sorted(found))
        return self._members[layout]

    def _shared(
        self, name: str, box: Box | None, layout: Layout, members: Counts
    ) -> SharedTensor | None:
        entry = self._manifest.tensors.get(name)
        if entry is None or entry.layout is None or 0 in entry.shape or box is None:
            return None
        if any(d is not None and d >= len(entry.shape) for d in layout.dims):
            return None
        key = (layout, entry.shape)
        if key not in self._boxes:
            places = [layout.coordinate(rank) for rank in members]
            self._boxes[key] = tuple(layout.box(entry.shape, at) for at in places)
        boxes = self._boxes[key]
        if boxes[members.index(self._rank)] != box:
            return None
        runs = self._runs(name, entry, layout, boxes)
        return SharedTensor(name, entry, boxes, runs) if runs else None

    def _runs(
        self, name: str, entry: TensorEntry, layout: Layout, boxes: tuple[Box, ...]
    ) -> tuple[Run, ...] | None:
        """What all members want together; None if each may as well read its part alone."""
        assert entry.layout is not None
        if entry.layout.num_replicas > 1:  # cut at other rows in each tensor
            return self._found(name, entry, layout, boxes)
        key = (id(entry.layout), layout, entry.shape, entry.dtype)
        if key not in self._met:
            self._met[key] = self._found(name, entry, layout, boxes)
        return self._met[key]

    def _found(
        self, name: str, entry: TensorEntry, layout: Layout, boxes: tuple[Box, ...]
    ) -> tuple[Run, ...] | None:
        if not any(self._is_worth(name, entry, box) for box in dict.fromkeys(boxes)):
            return None
        assert entry.layout is not None
        rows = replace(layout, dims=tuple(None if d else d for d in layout.dims))
        together = rows.box(entry.shape, layout.coordinate(self._rank))
        runs, before = [], 0
        for read in self._planner.reads(name, entry, entry.layout, together):
            assert read.region is not None
            assert read.part is not None
            size = shard_file.num_bytes(read.region.shape, entry.dtype)
            first, last = span(read.region, read.part, entry.dtype)
            block = min(shard_file.block_bytes(size), size)
            runs.append(Run(read.file, read.region, first, last, block, before))
            before += last - first
        return tuple(runs)

    def _is_worth(self, name: str, entry: TensorEntry, box: Box) -> bool:
        """Whether a member alone would read much more than its part."""
        assert entry.layout is not None
        if box.is_empty:
            return False
        alone = 0
        for read in self._planner.reads(name, entry, entry.layout, box):
            assert read.region is not None
            assert read.part is not None
            first, last = span(read.region, read.part, entry.dtype)
            if read.part.shape[1:] != read.region.shape[1:]:  # else the others want other rows
                size = shard_file.num_bytes(read.region.shape, entry.dtype)
                block = min(shard_file.block_bytes(size), size)
                first, last = first // block * block, min(-(-last // block) * block, size)
            alone += last - first
        return alone > WORTH * shard_file.num_bytes(box.shape, entry.dtype)


def stretch_boxes(shape: Counts, first: int, last: int) -> Iterator[Box]:
    """Elements `first` to `last` of a row-major array, as boxes, in their order."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    (row, begin), (end_row, end) = divmod(first, inner), divmod(last, inner)
    if row == end_row:
        yield from _in_row(row, stretch_boxes(shape[1:], begin, end))
        return
    if begin:
        yield from _in_row(row, stretch_boxes(shape[1:], begin, inner))
        row += 1
    if row < end_row:
        yield Box((row, *(0 for _ in shape[1:])), (end_row - row, *shape[1:]))
    yield from _in_row(end_row, stretch_boxes(shape[1:], 0, end))


def _in_row(row: int, boxes: Iterable[Box]) -> Iterator[Box]:
    return (Box((row, *box.offset), (1, *box.shape)) for box in boxes)


def _loads(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces in their order, as many together as do not exceed `PIECE_BYTES`."""
    found: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        size += piece.last - piece.first
        if not found or size > PIECE_BYTES:
            found.append([])
            size = piece.last - piece.first
        found[-1].append(piece)
    return found


def _digest(tensors: Iterable[SharedTensor], layouts: Mapping[str, Layout]) -> str:
    """Of what is read together; where it lies follows from the manifest."""
    texts = {layout: layout.to_json() for layout in {layouts[t.name] for t in tensors}}
    return digest(strict.canonical([[t.name, texts[layouts[t.name]]] for t in tensors]))
