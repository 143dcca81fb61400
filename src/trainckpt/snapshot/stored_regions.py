"""Find the regions a rank need not write again, as an older shard file has the same bytes. Pure.

    candidates   likely unchanged regions: they are digested at the boundary
    decide       those with the digest in the older file's header are referenced
    committed    the state for the next save: each region's file and digest

Only an equal digest makes a region unchanged. Candidates are chosen by history:

    likely       tensors no optimizer trains; others with equal digests in the last two saves
    not likely   a candidate that had changed: it must be equal in twice as many saves in a row
                 as before, 64 at most. Its own file needs its digest anyway

A referenced file is kept whole. So if little of a file is still used, that little is written anew,
and the file can be deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.format.shard_file import MIN_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.format.files import FileEntry
    from trainckpt.format.shard_file import Region

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
    """Locations of one rank's regions in the newest snapshot.

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
        held = known.held.get(key)
        if held is None or region.num_bytes < MIN_BYTES:
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


def committed(
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
