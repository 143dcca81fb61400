"""Prune: delete what the retention policy no longer keeps.

Never the newest usable snapshot, never a tagged one, never anything of a newer attempt, and no
abandoned branch: somebody who resumed elsewhere may want it back by name. The
manifest goes first, so that what is left of a cut-short deletion is garbage and not half a
snapshot; garbage of attempts that are over goes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format import names
from trainckpt.snapshot.catalog import NOT_COMMITTED, Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

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
    kept, doomed = 0, []
    for candidate in candidates:
        tagged = candidate.manifest is not None and bool(candidate.manifest.tags)
        if str(candidate.name) in keep or tagged:
            continue
        if candidate.usable and kept < max(keep_last, 1):
            kept += 1
        elif candidate.usable or _is_garbage(candidate, attempt):
            doomed.append(candidate.name)
    return tuple(doomed)


def _is_garbage(candidate: Candidate, attempt: int) -> bool:
    return candidate.reason == NOT_COMMITTED and candidate.name.attempt < attempt


def prune(
    tier: Tier, doomed: Iterable[SnapshotName], *, unless: Callable[[], bool] = lambda: False
) -> None:
    """Delete the named snapshots, each manifest before its files; none from when `unless` holds."""
    for name in doomed:
        if unless():
            return
        tier.remove(f"{name.folder}/{names.MANIFEST}")
        tier.remove_folder(name.folder)
