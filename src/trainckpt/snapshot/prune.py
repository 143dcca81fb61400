"""Delete snapshots: by the retention policy, or in a cleanup by the user.

`prune` runs in the live attempt. It keeps the newest usable snapshot, tagged ones, anything of a
newer attempt and abandoned branches, since a user may resume one by name. It also removes garbage
of finished saves. Order:

    1. the manifest   the snapshot stops existing
    2. its files      except those a remaining snapshot refers to; each stays in its folder until
                      no snapshot refers to it
    3. the folder     if empty

A crash in between leaves garbage for the next prune, never half a snapshot. A save in flight
refers only to files the newest snapshot holds or refers to, so none of those are deleted.

`plan_sweep` decides what a user's cleanup may delete besides: snapshots beyond a smaller limit,
files of dead attempts, abandoned branches on request. Always kept: the newest usable snapshot,
tagged ones, damaged ones (their bytes may be wanted), a live attempt's start and its uncommitted
files. Plans are pure; `prune` deletes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import names, shard_file
from trainckpt.snapshot.catalog import ABANDONED, NOT_COMMITTED, Candidate, reached_folders
from trainckpt.storage.denied_access import is_denied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.names import SnapshotName
    from trainckpt.snapshot.followed_run import FollowedRun
    from trainckpt.storage.base import Tier


def plan_prune(
    candidates: Iterable[Candidate], *, keep_last: int, attempt: int, keep: Collection[str] = ()
) -> tuple[SnapshotName, ...]:
    """Return the snapshots that the newest attempt deletes; arguments as for `plan_sweep`. Pure."""
    candidates = tuple(candidates)
    live = {c.name.attempt for c in candidates if c.name.attempt >= attempt}
    doomed = plan_sweep(candidates, keep_last=keep_last, live=live, keep=keep)
    return tuple(each.name for each in doomed)


def left_folders(candidates: Collection[Candidate]) -> tuple[SnapshotName, ...]:
    """Return pruned snapshots with files that others still refer to. Pure."""
    there = {candidate.name for candidate in candidates}
    reached = (reached_folders(candidate.manifest) for candidate in candidates)
    return tuple(sorted(set().union(*reached) - there))


def kept_files(
    tier: Tier, candidates: Iterable[Candidate], doomed: Collection[SnapshotName]
) -> frozenset[str]:
    """Return older files the remaining snapshots refer to, as `s2~1.2/rank00000.safetensors`.

    For a snapshot with an unreadable or unwritten manifest, its files' headers list them.

    Raises:
        TierUnavailable: the tier refused; then nothing may be deleted.
    """
    found: set[str] = set()
    for candidate in candidates:
        if candidate.name not in doomed:
            if candidate.manifest is not None:
                found.update(file.name for file in candidate.manifest.reached)
            else:
                found.update(_references_in(tier, candidate.name.folder))
    return frozenset(found)


def prune(
    tier: Tier,
    doomed: Iterable[SnapshotName],
    kept: Collection[str],
    *,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Delete the named snapshots, except the files to keep.

    Args:
        tier: Where they lie.
        doomed: Snapshots to delete, in this order.
        kept: Files in them to keep, from `kept_files`.
        unless: Nothing more is deleted once it returns True.

    Raises:
        TierUnavailable: the tier refused. Where it denied one, as it does with files of another
            user in a sticky directory, the others are deleted all the same.
    """
    denied: TierUnavailable | None = None
    for name in doomed:
        if unless():
            return
        try:
            tier.remove(f"{name.folder}/{names.MANIFEST}")
            tier.remove_folder(name.folder, keep=files_in(name, kept))
        except TierUnavailable as error:
            if not is_denied(error):
                raise
            denied = denied or error
    if denied is not None:
        raise denied


def prune_by_policy(
    followed: FollowedRun,
    attempts: Mapping[int, AttemptRecord],
    *,
    keep_last: int,
    attempt: int,
    keep: Collection[str] = (),
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Delete snapshots the newest attempt's policy drops, and files without references.

    Args:
        followed: The run, and the tier to prune.
        attempts: Its attempts, from `followed`.
        keep_last, attempt, keep: As for `plan_prune`.
        unless: As for `prune`.
    """
    candidates = followed.candidates(attempts)
    doomed = plan_prune(candidates, keep_last=keep_last, attempt=attempt, keep=keep)
    if doomed:
        candidates = followed.confirm(doomed)
        doomed = plan_prune(candidates, keep_last=keep_last, attempt=attempt, keep=keep)
    kept = kept_files(followed.tier, candidates, doomed)
    followed.forget(doomed)
    prune(followed.tier, [*doomed, *left_folders(candidates)], kept, unless=unless)


def files_in(name: SnapshotName, kept: Iterable[str]) -> frozenset[str]:
    """Return the names of the files to keep in one snapshot's folder."""
    return frozenset(file.partition("/")[2] for file in kept if file.startswith(f"{name}/"))


def _references_in(tier: Tier, folder: str) -> set[str]:
    found: set[str] = set()
    for name in tier.list(folder):
        key = f"{folder}/{name}"
        try:
            num_bytes = tier.size(key) or 0  # refuses what is no file, before it is opened
            prefix = bytearray(8)
            tier.read_into(key, 0, memoryview(prefix))
            head = bytearray(min(shard_file.header_length(prefix, key), num_bytes))
            tier.read_into(key, 0, memoryview(head))
            found.update(shard_file.parse(bytes(head), key, file_bytes=None).references.values())
        except UnusableSnapshot:  # a manifest, or an unreadable file
            continue
    return found


OLD = "older than the {} kept"
GARBAGE = "not committed: left by an interrupted save"
UNREACHED = "pruned before, and no snapshot refers to it now"
BRANCH = "abandoned branch"


@dataclass(frozen=True)
class SweepCandidates:
    """One snapshot folder to delete, with the reason."""

    name: SnapshotName
    reason: str


def plan_sweep(
    candidates: Iterable[Candidate],
    *,
    keep_last: int,
    live: Collection[int] = (),
    keep: Collection[str] = (),
    abandoned: bool = False,
) -> tuple[SweepCandidates, ...]:
    """Return the folders to delete, each with the reason. Pure.

    Args:
        candidates: The catalog, newest first.
        keep_last: Usable snapshots to keep, at least 1.
        live: Attempts that may be saving now; their uncommitted folders stay.
        keep: Full names to keep whatever the policy says.
        abandoned: Delete abandoned branches too.
    """
    kept, number, doomed, candidates = 0, max(keep_last, 1), [], tuple(candidates)
    committed: dict[int, int] = {}  # attempt -> its newest commit
    for candidate in candidates:
        at = candidate.name
        if candidate.manifest is not None:
            committed[at.attempt] = max(committed.get(at.attempt, 0), at.sequence)
    for candidate in candidates:
        name = candidate.name
        if str(name) in keep or (candidate.manifest is not None and candidate.manifest.tags):
            continue
        if candidate.usable and kept < number:
            kept += 1
        elif candidate.usable:
            doomed.append(SweepCandidates(name, OLD.format(number)))
        elif candidate.reason == NOT_COMMITTED and (
            # An attempt saves one at a time, so an older save of a live one has ended too.
            name.attempt not in live or name.sequence < committed.get(name.attempt, 0)
        ):
            doomed.append(SweepCandidates(name, GARBAGE))
        elif candidate.reason == ABANDONED and abandoned:
            doomed.append(SweepCandidates(name, BRANCH))
    return tuple(doomed)
