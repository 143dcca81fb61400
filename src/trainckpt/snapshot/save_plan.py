"""The save plan: which bytes of the state each rank stores. Pure; the same on every rank.

What all ranks hold alike is laid end to end in the order of names and cut into `world` equal
stretches, one a rank, so each byte is copied, kept and written once. A cut falls between rows of
a tensor; small tensors are not cut. Everything else is the rank's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format.shard_file import Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

UNCUT_BYTES = 1 << 16


def plan_save(
    regions: Iterable[Region],
    groups: Mapping[str, str],
    shared: Collection[str],
    *,
    rank: int,
    world: int,
) -> tuple[Region, ...]:
    """Decide which regions `rank` stores.

    Args:
        regions: Every tensor of this rank, whole.
        groups: Tensor name -> group.
        shared: Groups whose bytes are equal on all ranks.
        rank: The one to plan for.
        world: Number of ranks.

    Returns:
        Regions sorted by key. Over all ranks they cover every shared tensor exactly once.
    """
    own: list[Region] = []
    split: list[Region] = []
    for region in regions:
        (split if groups.get(region.tensor) in shared else own).append(region)
    split.sort(key=lambda region: region.tensor)
    total = sum(region.num_bytes for region in split)
    at = 0
    for region in split:
        own += _part(region, at, total, rank, world)
        at += region.num_bytes
    return tuple(sorted(own, key=lambda region: region.key))


def _part(region: Region, at: int, total: int, rank: int, world: int) -> list[Region]:
    """What `rank` stores of a tensor whose bytes begin at `at` in the stretch of all."""
    size = region.num_bytes
    if size <= UNCUT_BYTES or not region.shape or region.shape[0] < 2:
        owner = min(at * world // total, world - 1) if total else 0
        return [region] if owner == rank else []
    rows = region.shape[0]
    first = _cut(at, size, rows, total * rank // world)
    last = _cut(at, size, rows, total * (rank + 1) // world)
    if rank == world - 1:
        last = rows
    if first >= last:
        return []
    offset = (first, *region.offset[1:])
    shape = (last - first, *region.shape[1:])
    return [Region(region.tensor, region.dtype, offset, shape, region.of, region.true_dtype)]


def _cut(at: int, size: int, rows: int, boundary: int) -> int:
    """The row at which `boundary`, counted in bytes of the stretch, cuts a tensor."""
    return min(max((boundary - at) * rows // size, 0), rows)
