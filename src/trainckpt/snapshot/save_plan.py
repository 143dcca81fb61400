"""Plan a save: the bytes each rank stores. Pure; equal on every rank.

Replicated tensors are divided over their ranks by `format.layout.Stretch`, so each byte is copied,
stored and written once. A rank stores its unreplicated boxes and its own tensors whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.format.layout import Stretch
from trainckpt.format.shard_file import MIN_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainckpt.format.layout import Layout
    from trainckpt.format.manifest import FileEntry
    from trainckpt.format.shard_file import Region


# ---- stored regions: an older shard file has the same bytes
#
#     candidates   likely unchanged regions: they are digested at the boundary
#     decide       those with the digest in the older file's header are referenced
#     regions_after_save    the state for the next save: each region's file and digest
#
# Only an equal digest makes a region unchanged. Candidates are chosen by history:
#
#     likely       tensors no optimizer trains; others with equal digests in the last two saves
#     not likely   a candidate that had changed: it must be equal in twice as many saves in a row
#                  as before, 64 at most. Its own file needs its digest anyway
#
# A referenced file is kept whole. So if little of a file is still used, that little is written
# anew, and the file can be deleted.


MIN_BYTES = MIN_BLOCK_BYTES  # smaller regions are written faster than looked up
# Share of a file still in use, at least: so all files of a run hold at most a few times the bytes
# of the newest snapshot, and writing the rest anew costs less than the changes since then did.
MIN_SHARE = 0.3
MAX_FILES = 8  # referenced files per rank; a restore opens each
MAX_STREAK = 64


class StoredRegion(NamedTuple):
    """A region with its digests, and the shard file that stores it."""

    file: str
    region: Region


@dataclass
class StoredRegions:
    """Locations of one rank's regions of at least `MIN_BYTES` in the newest snapshot.

    Attributes:
        held: By key.
        files: Path, as for `names.reached_file` -> length and digests.
        streaks: Key -> consecutive saves with the region unchanged.
        needed: Key -> streak needed to be a candidate again, for candidates that had changed.
    """

    held: dict[str, StoredRegion] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    needed: dict[str, int] = field(default_factory=dict)


def candidates(
    known: StoredRegions, planned: Iterable[Region], is_untrained: Callable[[str], bool]
) -> Iterator[Region]:
    """Yield the regions worth a digest now.

    Args:
        known: Of the newest committed snapshot.
        planned: Regions this rank stores now.
        is_untrained: Returns True if no optimizer changes the tensor of that name.
    """
    for region in planned:
        key = region.key
        if region.num_bytes < MIN_BYTES or (held := known.held.get(key)) is None:
            continue
        needed = known.needed.get(key)
        if needed is None:
            needed = 0 if is_untrained(region.tensor) else 1
        if known.streaks.get(key, 0) >= needed and _is_same(region, held.region):
            yield region


def decide(
    known: StoredRegions, planned: Iterable[Region], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the regions to reference instead of writing: key -> path of the file.

    Args:
        known: Of the newest committed snapshot; candidates that changed are recorded in it.
        planned: Regions this rank stores now.
        digests: Of the candidates, by key.
    """
    equal: dict[str, list[Region]] = {}
    for region in planned:
        if region.key not in digests:
            continue
        held = known.held[region.key]
        if digests[region.key] == held.region.digest:
            equal.setdefault(held.file, []).append(region)
        else:
            known.streaks[region.key] = 0
            needed = known.needed.get(region.key, 1)
            known.needed[region.key] = min(2 * needed, MAX_STREAK)
    used = {file: sum(r.num_bytes for r in regions) for file, regions in equal.items()}
    worth = [file for file in used if used[file] >= MIN_SHARE * known.files[file].num_bytes]
    worth.sort(key=lambda file: (-used[file], file))
    return {region.key: file for file in worth[:MAX_FILES] for region in equal[file]}


def regions_after_save(
    known: StoredRegions, file: FileEntry, regions: Iterable[Region], references: Mapping[str, str]
) -> StoredRegions:
    """Return the state after a commit.

    Args:
        known: The state before.
        file: This rank's new file; its name is its path.
        regions: Regions in it, with their digests.
        references: Regions not written: key -> path.
    """
    held = {region.key: StoredRegion(file.name, region) for region in regions}
    held.update({key: known.held[key] for key in references})
    streaks = {
        key: known.streaks.get(key, 0) + 1
        for key, now in held.items()
        if (before := known.held.get(key)) is not None
        and now.region.digest == before.region.digest  # usually false: test it first
        and _is_same(now.region, before.region)
    }
    files = {path: known.files[path] for path in references.values()}
    needed = {key: saves for key, saves in known.needed.items() if key in held}
    return StoredRegions(held, {**files, file.name: file}, streaks, needed)


def _is_same(a: Region, b: Region) -> bool:
    """Return True for the same box and type of the same tensor, wherever it lies."""
    ours = a.tensor, a.dtype, a.offset, a.shape, a.of, a.true_dtype
    return ours == (b.tensor, b.dtype, b.offset, b.shape, b.of, b.true_dtype)


# ---- the plan


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
        if layout is None or (layout.num_replicas == 1 and region.num_bytes):
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
    if not region.shape or (first, last) == (0, region.shape[0]):
        return [region]
    offset = (region.offset[0] + first, *region.offset[1:])
    return [replace(region, offset=offset, shape=(last - first, *region.shape[1:]))]
