"""Prune: delete what the retention policy no longer keeps.

Never the newest usable snapshot, never a tagged one, never anything of a newer attempt, and no
abandoned branch: somebody who resumed elsewhere may want it back by name. Garbage of saves that are
over goes too.

    1. its manifest   the snapshot does not exist any more
    2. its files      but those that a snapshot which stays refers to: each is kept, in its folder,
                      until none does
    3. its folder     if nothing is left in it

Whatever a crash leaves undone is garbage, never half a snapshot, and goes the next time. A save in
flight refers only to what the newest snapshot holds or refers to, so all of that is there still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import names, shard_file
from trainckpt.snapshot.catalog import NOT_COMMITTED, Candidate, reached_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from trainckpt.format.names import SnapshotName
    from trainckpt.tiers.base import Tier


def plan_prune(
    candidates: Iterable[Candidate], *, keep_last: int, attempt: int, keep: Collection[str] = ()
) -> tuple[SnapshotName, ...]:
    """Decide what to delete. Pure.

    Args:
        candidates: The catalog, newest first.
        keep_last: Usable snapshots to keep, at least 1.
        attempt: The newest attempt, which is doing this; nothing of its own that is
            uncommitted is touched: it may be a save in flight.
        keep: Full names to keep whatever the policy says.
    """
    kept, doomed, candidates = 0, [], tuple(candidates)
    committed = last_committed(candidates)
    for candidate in candidates:
        tagged = candidate.manifest is not None and bool(candidate.manifest.tags)
        if str(candidate.name) in keep or tagged:
            continue
        if candidate.usable and kept < max(keep_last, 1):
            kept += 1
        elif candidate.usable or (
            candidate.reason == NOT_COMMITTED
            and (candidate.name.attempt < attempt or is_over(candidate.name, committed))
        ):
            doomed.append(candidate.name)
    return tuple(doomed)


def last_committed(candidates: Iterable[Candidate]) -> dict[int, int]:
    """Attempt -> the newest sequence number that it has committed."""
    found: dict[int, int] = {}
    for candidate in candidates:
        if candidate.manifest is not None:
            at = candidate.name.attempt
            found[at] = max(found.get(at, 0), candidate.name.sequence)
    return found


def is_over(name: SnapshotName, committed: Mapping[int, int]) -> bool:
    """Whether a save was followed by a committed one: an attempt takes one at a time."""
    return name.sequence < committed.get(name.attempt, 0)


def left_folders(candidates: Collection[Candidate]) -> tuple[SnapshotName, ...]:
    """Snapshots that were pruned before, and of which files were kept for others then. Pure."""
    there = {candidate.name for candidate in candidates}
    reached = (reached_folders(candidate.manifest) for candidate in candidates)
    return tuple(sorted(set().union(*reached) - there))


def kept_files(
    tier: Tier, candidates: Iterable[Candidate], doomed: Collection[SnapshotName]
) -> frozenset[str]:
    """Older files that what stays refers to, as `s2~1.2/rank00000.safetensors`.

    Of a snapshot whose manifest cannot be read, or is not written yet, the headers of its files
    tell it.

    Raises:
        TierUnavailable: the tier denied a look; then nothing may be deleted.
    """
    found: set[str] = set()
    for candidate in candidates:
        if candidate.name not in doomed:
            if candidate.manifest is not None:
                found.update(file.name for file in candidate.manifest.reached)
            else:
                found.update(_told_by_headers(tier, candidate.name.folder))
    return frozenset(found)


def prune(
    tier: Tier,
    doomed: Iterable[SnapshotName],
    kept: Collection[str],
    *,
    unless: Callable[[], bool] = lambda: False,
    reuse: Collection[SnapshotName] = (),
) -> None:
    """Delete the named snapshots and, of `left_folders`, what nobody needs any more.

    Args:
        tier: Where they lie.
        doomed: In this order.
        kept: Files in them that stay, from `kept_files`.
        unless: Nothing more is deleted once it holds.
        reuse: Of these, files may be written over: nobody has them open to write.
    """
    for name in doomed:
        if unless():
            return
        tier.remove(f"{name.folder}/{names.MANIFEST}")
        tier.remove_folder(name.folder, keep=files_in(name, kept), reuse=name in reuse)


def prune_by_policy(
    tier: Tier,
    candidates: Iterable[Candidate],
    *,
    keep_last: int,
    attempt: int,
    keep: Collection[str] = (),
    unless: Callable[[], bool] = lambda: False,
    reuse: bool = False,
) -> None:
    """Delete what the newest attempt's policy no longer keeps, and what nothing refers to.

    Args:
        tier, candidates: Where, and the catalog there, newest first.
        keep_last, attempt, keep: As for `plan_prune`.
        unless: As for `prune`.
        reuse: Files may be written over: those that only ranks of this attempt have written, and
            all of them have.
    """
    candidates = tuple(candidates)
    doomed = plan_prune(candidates, keep_last=keep_last, attempt=attempt, keep=keep)
    kept = kept_files(tier, candidates, doomed)
    own = {c.name for c in candidates if reuse and c.usable and c.name.attempt == attempt}
    prune(tier, [*doomed, *left_folders(candidates)], kept, unless=unless, reuse=own)


def files_in(name: SnapshotName, kept: Iterable[str]) -> frozenset[str]:
    """Names of the files in the folder of one snapshot that stay."""
    return frozenset(file.partition("/")[2] for file in kept if file.startswith(f"{name}/"))


def _told_by_headers(tier: Tier, folder: str) -> set[str]:
    found: set[str] = set()
    for name in tier.list(folder):
        key = f"{folder}/{name}"
        try:
            prefix = bytearray(8)
            tier.read_into(key, 0, memoryview(prefix))
            head = bytearray(min(shard_file.header_length(prefix, key), tier.size(key) or 0))
            tier.read_into(key, 0, memoryview(head))
            found.update(shard_file.parse(bytes(head), key, file_bytes=None).references.values())
        except UnusableSnapshot:  # a manifest, or a file of which nobody can read anything
            continue
    return found
