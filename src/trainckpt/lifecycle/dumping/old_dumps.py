"""Dumps that no resume brings back any more. What they hold of the disk is given back.

In the run's place the record stays: it is small, and attempts name it as their parent.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.dump import DUMPS, IMAGES, DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.process_dump.sealed_images import OPENED
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Readable, Tier


@dataclass(frozen=True)
class OldDump:
    """One whose images are of no use, why, and how large they are."""

    name: DumpName
    reason: str
    num_bytes: int


def why_superseded(name: DumpName, records: Mapping[int, AttemptRecord]) -> str:
    """Why no resume brings a dump back, whatever its images are; "" if one may. Pure."""
    for number, record in sorted(records.items()):
        if record.parent == str(name):
            how = (record.outcome or {}).get("outcome")
            return f"attempt {number} went on from it{f' and {how}' if how else ''}"
    later = max(records, default=0)
    if later > name.attempt:
        return f"attempt {later} began later"
    newest = SnapshotName.parse(records[later].newest_commit or "") if later in records else None
    if newest is not None and (newest.attempt, newest.sequence) > (name.attempt, name.sequence):
        return f"{newest} was committed later"
    return ""


def old_dumps(
    tier: Readable, records: Mapping[int, AttemptRecord], *, is_copy: bool = False
) -> list[OldDump]:
    """Those that still have images, oldest first; not what is being brought back right now.

    Args:
        tier, records: Where they lie, and the attempts of the run.
        is_copy: It is a slower tier, where nothing at all of them is to stay.
    """
    if not is_copy and not isinstance(tier, LocalTier):
        return []  # no dump is taken there
    newest = records.get(max(records, default=0))
    at_work = None  # what is being brought back is read in the run's place
    if newest is not None and newest.outcome is None and not is_copy:
        at_work = newest.parent
    names = sorted(n for n in map(DumpName.parse, tier.list(DUMPS)) if n is not None)
    found = []
    for name in names:
        reason = why_superseded(name, records)
        if reason and str(name) != at_work and ((size := _num_bytes(tier, name)) or is_copy):
            found.append(OldDump(name, reason, size))
    return found


def remove(tier: Tier, old: OldDump, *, is_copy: bool = False) -> None:
    """Delete its images, and of a copy the rest too, its record first; what is denied stays."""
    with contextlib.suppress(TrainckptError):
        if is_copy:
            tier.remove(old.name.record)
            tier.remove(old.name.word)
        tier.remove_folder(f"{old.name.folder}/{IMAGES}")
        tier.remove_folder(f"{old.name.folder}/{OPENED}")  # of a resume that was killed
        if is_copy:
            tier.remove_folder(old.name.folder)


def _num_bytes(tier: Readable, name: DumpName) -> int:
    with contextlib.suppress(TrainckptError):
        folders = [f"{name.folder}/{each}" for each in (IMAGES, OPENED)]
        return sum(tier.size(f"{f}/{image}") or 0 for f in folders for image in tier.list(f))
    return 0
