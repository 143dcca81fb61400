"""Plan a restore: the bytes of each file a rank reads. Pure; the mirror of `save_plan`.

A rank asks for one box of each tensor, in its present layout. The files with parts of the box
follow from the layout the tensor was saved in: no list of regions is searched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.layout import Box, Counts, Stretch, whole
from trainckpt.format.shard_file import ITEM_BYTES, region_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainckpt.format.layout import Layout
    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.format.shard_file import Region


class RegionRead(NamedTuple):
    """One part to read.

    Attributes:
        file: Number of the file, equal to the rank that wrote it.
        tensor: Its name.
        region: The box in the file; None: any box of this tensor.
        part: The wanted elements of it; None: all.
    """

    file: int
    tensor: str
    region: Box | None = None
    part: Box | None = None


def plan_restore(
    manifest: Manifest,
    wanted: Mapping[str, Box | None],
    *,
    donor: int,
    planner: Planner | None = None,
) -> tuple[RegionRead, ...]:
    """Return the reads, sorted by file.

    Args:
        manifest: The snapshot's.
        wanted: Tensor -> box; None: the whole tensor.
        donor: The rank whose copy is read of tensors that are each rank's own.
        planner: A planner of this manifest, to reuse over several calls.

    Raises:
        UnusableSnapshot: a tensor is not in the manifest, or the box does not lie in it.
    """
    planner = planner or Planner(manifest)
    reads: list[RegionRead] = []
    for name, asked in wanted.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            raise UnusableSnapshot(f"{name[:100]} is not in the manifest")
        if entry.layout is None:
            reads.append(RegionRead(donor, name, None, asked))
        else:
            box = asked or whole(entry.shape)
            reads += planner.reads(name, entry, entry.layout, box)
    reads.sort(key=lambda read: read.file)
    return tuple(reads)


def find(read: RegionRead, entry: TensorEntry, regions: Mapping[str, Region], what: str) -> Region:
    """Return the region in a file's header for `read`.

    Raises:
        UnusableSnapshot: it is missing, or differs from the manifest.
    """
    if read.region is None:
        held = regions.get(read.tensor)
    else:
        key = region_key(read.tensor, read.region.offset, read.region.shape, entry.shape)
        held = regions.get(key)
    if held is None:
        raise UnusableSnapshot(f"{what} does not hold {read.tensor[:100]}")
    if read.region is None:  # a rank's own tensor: the manifest has the first rank's type
        fits = held.is_whole
    else:
        in_manifest = (read.region, entry.shape, entry.dtype)
        fits = (held.box, held.of, held.dtype) == in_manifest
    if not fits or held.tensor != read.tensor:
        raise UnusableSnapshot(f"{read.tensor[:100]} in {what} differs from the manifest")
    return held


def span(region: Box, part: Box, dtype: str) -> tuple[int, int]:
    """Return the bytes of `part` in a region: the first, and one past the last of its runs."""
    if part.is_empty:
        return 0, 0
    first = last = 0
    for o, n, at, extent in zip(part.offset, part.shape, region.offset, region.shape, strict=True):
        first = first * extent + (o - at)
        last = last * extent + (o - at + n - 1)
    item = ITEM_BYTES[dtype]
    return first * item, (last + 1) * item


class Planner:
    """Locates boxes in files; looks up tensors of one shape and layout once."""

    def __init__(self, manifest: Manifest) -> None:
        self._met: dict[tuple[int, Counts, Box], list[tuple[int, Box, Box]]] = {}
        self._stretches: dict[Layout, Stretch] = {}
        self._sizes: dict[Layout, dict[str, int]] = {}
        for name, entry in manifest.tensors.items():
            if entry.layout is not None and entry.layout.num_replicas > 1:
                self._sizes.setdefault(entry.layout, {})[name] = entry.num_bytes

    def reads(self, name: str, entry: TensorEntry, layout: Layout, wanted: Box) -> list[RegionRead]:
        """Return the reads for one tensor."""
        if 0 in entry.shape:
            return [RegionRead(layout.base, name, whole(entry.shape), whole(entry.shape))]
        if wanted.is_empty and entry.dtype == "U8":  # the header has their true type
            _check(name, entry, wanted)
            first = Box((0,) * len(entry.shape), (1,) * len(entry.shape))
            read = self.reads(name, entry, layout, first)[0]
            return [read._replace(part=Box(first.offset, first.offset))]
        key = (id(layout), entry.shape, wanted)
        if layout.num_replicas > 1:
            return list(self._from_replicas(name, entry, layout, wanted))
        if key not in self._met:
            _check(name, entry, wanted)
            self._met[key] = [
                (layout.rank_at(coordinate), box, box.common(wanted))
                for coordinate, box in layout.overlapping(entry.shape, wanted)
            ]
        return [RegionRead(rank, name, box, part) for rank, box, part in self._met[key]]

    def _from_replicas(
        self, name: str, entry: TensorEntry, layout: Layout, wanted: Box
    ) -> Iterator[RegionRead]:
        _check(name, entry, wanted)
        if layout not in self._stretches:
            self._stretches[layout] = Stretch(self._sizes[layout], layout.num_replicas)
        stretch = self._stretches[layout]
        for coordinate, box in layout.overlapping(entry.shape, wanted):
            common = box.common(wanted)
            low = common.offset[0] - box.offset[0] if box.shape else 0
            high = low + common.shape[0] if box.shape else 1
            for replica, first, last in stretch.holders(name, box, low, high):
                rank = layout.with_replica(coordinate, replica)
                if not box.shape:
                    yield RegionRead(rank, name, box, common)
                    continue
                offset = (box.offset[0] + first, *box.offset[1:])
                held = Box(offset, (last - first, *box.shape[1:]))
                yield RegionRead(rank, name, held, held.common(common))


def _check(name: str, entry: TensorEntry, wanted: Box) -> None:
    if len(wanted.shape) != len(entry.shape) or any(
        o + n > of for o, n, of in zip(wanted.offset, wanted.shape, entry.shape, strict=True)
    ):
        raise UnusableSnapshot(f"{name[:100]} is {list(entry.shape)}, too small for {wanted}")
