"""The restore plan: which bytes of which file a rank reads. Pure; the mirror of `save_plan`.

A rank reads what is its own from its own file, and every region of what was split, wherever it
lies. Same number of ranks as the writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.manifest import SPLIT, Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.shard_file import Region, ShardHeader


@dataclass(frozen=True)
class Read:
    """One region to read: from file number `file`, `first_byte` counted from its beginning."""

    file: int
    first_byte: int
    region: Region


def plan_restore(
    manifest: Manifest, headers: Sequence[ShardHeader], *, rank: int
) -> tuple[Read, ...]:
    """Decide what `rank` reads, sorted by file and place.

    Raises:
        UnusableSnapshot: a header names a tensor the manifest does not, or of another shape, or
            more memory than the snapshot has bytes.
    """
    reads = []
    split: dict[str, list[Region]] = {}
    for number, header in enumerate(headers):
        for region in header.regions:
            entry = manifest.tensors.get(region.tensor)
            if entry is None:
                raise UnusableSnapshot(f"{region.tensor[:100]} is not in the manifest")
            if entry.placement == SPLIT:
                _check_split(region, entry.dtype, entry.shape)
                split.setdefault(region.tensor, []).append(region)
            elif not region.is_whole:
                raise UnusableSnapshot(f"{region.tensor[:100]} is cut, and no rank has the rest")
            if entry.placement == SPLIT or number == rank:
                reads.append(Read(number, header.header_bytes + region.first_byte, region))
    for name, entry in manifest.tensors.items():
        if entry.placement == SPLIT:
            _check_complete(name, entry.shape, split.get(name, []))
    return tuple(reads)


def _check_complete(name: str, shape: tuple[int, ...], regions: list[Region]) -> None:
    """Every row once: then the memory for the whole is not more than the files have bytes."""
    row = 0
    for region in sorted(regions, key=lambda r: r.offset):
        follows = region.is_whole or (region.offset[0] == row and region.shape[0] > 0)
        row += (region.shape[0] if region.shape else 1) if follows else -(2**63)
    if row != (shape[0] if shape else 1) or (len(regions) != 1 and 0 in shape):
        raise UnusableSnapshot(f"the parts of {name[:100]} do not make up the whole of it")


def _check_split(region: Region, dtype: str, shape: tuple[int, ...]) -> None:
    if (region.dtype, region.of) != (dtype, shape):
        raise UnusableSnapshot(f"{region.tensor[:100]} is not what the manifest says of it")
    if not region.is_whole and region.shape[1:] != region.of[1:]:
        raise UnusableSnapshot(f"{region.tensor[:100]} is cut across its rows")
