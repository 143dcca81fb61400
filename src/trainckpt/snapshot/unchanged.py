"""Unchanged: which regions of a rank an older shard file holds already, byte for byte. Pure.

    candidates   regions of which it is likely: they are digested now, at the boundary
    decide       those whose digest is the one that the older file's header says are referred to
    committed    what is known for the next save: each region's file and digest

Only an equal digest makes a region unchanged. That it is frozen, or stayed as it was for a while,
makes it likely:

    likely       what no optimizer trains; else what had equal digests in the last two saves
    not likely   what was a candidate and had changed: it must be found equal in twice as many saves
                 in a row as the time before, 64 at the most; its own file needs its digest anyway

A file that is referred to is kept whole. So of one of which little is still used that little is
written anew, and the file can go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.format.shard_file import MIN_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.format.files import FileEntry
    from trainckpt.format.shard_file import Region

MIN_BYTES = MIN_BLOCK_BYTES  # of a region: what is smaller is written faster than it is looked up
# Of a file that must still be used: so all files of a run together hold at most a few times what
# the newest snapshot needs, and writing the rest anew costs less than the changes since have cost.
MIN_SHARE = 0.3
MAX_FILES = 8  # that one rank refers to; each is opened when the snapshot is read
MAX_STREAK = 64


class Held(NamedTuple):
    """A region, with its digests, and the shard file that holds its bytes."""

    file: str
    region: Region


@dataclass
class Known:
    """What one rank knows of the newest snapshot: where its regions lie.

    Attributes:
        held: By key.
        files: Path, as `names.reached_file` reads it -> length and digests.
        streaks: Key -> saves in a row that found the region as it was.
        needed: Key -> such saves it takes to be a candidate again, of what has changed as one.
    """

    held: dict[str, Held] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    needed: dict[str, int] = field(default_factory=dict)


def candidates(
    known: Known, planned: Iterable[Region], is_untrained: Callable[[str], bool]
) -> Iterator[Region]:
    """The regions that are worth a digest now.

    Args:
        known: Of the newest committed snapshot.
        planned: What this rank stores now.
        is_untrained: Whether no optimizer changes the tensor of that name.
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


def decide(known: Known, planned: Iterable[Region], digests: Mapping[str, str]) -> dict[str, str]:
    """Which regions are not written, and the file that holds each: key -> path.

    Args:
        known: Takes note of candidates that have changed.
        planned: What this rank stores now.
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
    known: Known, file: FileEntry, regions: Iterable[Region], references: Mapping[str, str]
) -> Known:
    """What is known once a snapshot was committed.

    Args:
        known: Of the one before.
        file: This rank's new file; its name is its path.
        regions: In it, with their digests.
        references: What it refers to.
    """
    held = {region.key: Held(file.name, region) for region in regions}
    held.update({key: known.held[key] for key in references})
    streaks = {
        key: known.streaks.get(key, 0) + 1
        for key, now in held.items()
        if (before := known.held.get(key)) is not None
        and now.region.digest == before.region.digest  # most often not
        and _is_same(now.region, before.region)
    }
    files = {path: known.files[path] for path in references.values()}
    needed = {key: saves for key, saves in known.needed.items() if key in held}
    return Known(held, {**files, file.name: file}, streaks, needed)


def _is_same(a: Region, b: Region) -> bool:
    """The same box of the same tensor, of the same type; where it lies is not looked at."""
    ours = a.tensor, a.dtype, a.offset, a.shape, a.of, a.true_dtype
    return ours == (b.tensor, b.dtype, b.offset, b.shape, b.of, b.true_dtype)
