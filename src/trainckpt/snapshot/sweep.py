"""Sweep: what somebody who cleans up a run's place by hand may delete, and why. Pure.

A live attempt prunes by itself (`prune`); this is for what it leaves: fewer snapshots than its own
policy keeps, files of attempts that died, branches that nobody will go back to. Deleting is left
to `prune.prune`. Kept in any case: the newest usable snapshot, tagged ones, damaged ones (their
bytes may be wanted), what a live attempt begins from, and whatever it has not committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.snapshot.catalog import ABANDONED, NOT_COMMITTED
from trainckpt.snapshot.prune import is_over, last_committed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from trainckpt.format.names import SnapshotName
    from trainckpt.snapshot.catalog import Candidate

OLD = "older than the {} kept"
GARBAGE = "not committed: left by a save that is over"
UNREACHED = "pruned before, and no checkpoint refers to it any more"
BRANCH = "abandoned branch"


@dataclass(frozen=True)
class Doomed:
    """One snapshot's folder that goes, and why."""

    name: SnapshotName
    reason: str


def plan_sweep(
    candidates: Iterable[Candidate],
    *,
    keep_last: int,
    live: Collection[int] = (),
    keep: Collection[str] = (),
    abandoned: bool = False,
) -> tuple[Doomed, ...]:
    """Decide what to delete.

    Args:
        candidates: The catalog, newest first.
        keep_last: Usable snapshots to keep, at least 1.
        live: Attempts that may be saving now; nothing uncommitted of theirs is touched.
        keep: Full names to keep whatever the policy says.
        abandoned: Whether abandoned branches go too.
    """
    kept, doomed, candidates = 0, [], tuple(candidates)
    committed = last_committed(candidates)
    number = max(keep_last, 1)
    for candidate in candidates:
        name = candidate.name
        if str(name) in keep or (candidate.manifest is not None and candidate.manifest.tags):
            continue
        if candidate.usable and kept < number:
            kept += 1
        elif candidate.usable:
            doomed.append(Doomed(name, OLD.format(number)))
        elif candidate.reason == NOT_COMMITTED and (
            name.attempt not in live or is_over(name, committed)
        ):
            doomed.append(Doomed(name, GARBAGE))
        elif candidate.reason == ABANDONED and abandoned:
            doomed.append(Doomed(name, BRANCH))
    return tuple(doomed)
