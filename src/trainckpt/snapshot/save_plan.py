"""Plan a save: the bytes each rank stores. Pure; equal on every rank.

Replicated tensors are divided over their ranks by `format.layout.Stretch`, so each byte is copied,
stored and written once. A rank stores its unreplicated boxes and its own tensors whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.format.layout import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainckpt.format.layout import Layout
    from trainckpt.format.shard_file import Region


def plan_save(
    regions: Iterable[Region], layouts: Mapping[str, Layout], *, rank: int
) -> tuple[Region, ...]:
    """Return the regions `rank` stores.

    Args:
        regions: This rank's box of each tensor.
        layouts: Tensor name -> layout, where its replicas are equal. A tensor without one is the
            rank's own.
        rank: The rank to plan for.

    Returns:
        Regions sorted by key. Over all ranks they cover every tensor with a layout exactly once.
    """
    own: list[Region] = []
    split: dict[Layout, list[Region]] = {}
    for region in regions:
        layout = layouts.get(region.tensor)
        if layout is None:
            own.append(region)
        else:
            split.setdefault(layout, []).append(region)
    for layout, held in split.items():
        stretch = Stretch({r.tensor: r.whole_bytes for r in held}, layout.num_replicas)
        replica = layout.replica(layout.coordinate(rank))
        for region in held:
            first, last = stretch.rows(region.tensor, region.box, replica)
            own += _rows(region, first, last)
            if 0 in region.of and rank == layout.base:  # no bytes, but a name in a file
                own.append(replace(region, offset=(0,) * len(region.of), shape=region.of))
    return tuple(sorted(own, key=lambda region: region.key))


def equal_groups(reports: Sequence[Mapping[str, Sequence[Any]]]) -> list[str]:
    """Return the groups of tensors with equal replicas in every set of replicas.

    Args:
        reports: By rank: group -> (name of its set of replicas, ranks in it, digest).
    """
    digests: dict[str, dict[str, list[Any]]] = {}
    for report in reports:
        for group, (name, members, digest) in report.items():
            digests.setdefault(group, {}).setdefault(name, []).append((members, digest))
    return sorted(
        group
        for group, sets in digests.items()
        if all(len(found) == found[0][0] and len(set(found)) == 1 for found in sets.values())
    )


def _rows(region: Region, first: int, last: int) -> list[Region]:
    if first >= last or region.box.is_empty:
        return []
    if not region.shape:
        return [region]
    offset = (region.offset[0] + first, *region.offset[1:])
    return [replace(region, offset=offset, shape=(last - first, *region.shape[1:]))]
