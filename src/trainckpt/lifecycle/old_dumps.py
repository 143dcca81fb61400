"""Dumps that no resume brings back any more. What they hold of the disk is given back.

The record stays: it is small, and attempts name it as their parent.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.format.dump import DUMPS, IMAGES, DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Readable


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


def old_dumps(tier: Readable, records: Mapping[int, AttemptRecord]) -> list[OldDump]:
    """Those that still have images, oldest first; not what is being brought back right now."""
    if not isinstance(tier, LocalTier):
        return []
    newest = records.get(max(records, default=0))
    at_work = newest.parent if newest is not None and newest.outcome is None else None
    names = sorted(n for n in map(DumpName.parse, tier.list(DUMPS)) if n is not None)
    found = []
    for name in names:
        reason = why_superseded(name, records)
        if reason and str(name) != at_work and (size := _num_bytes(tier, name)):
            found.append(OldDump(name, reason, size))
    return found


def remove(tier: Readable, old: OldDump) -> None:
    """Delete its images; what cannot be deleted stays."""
    if isinstance(tier, LocalTier):
        with contextlib.suppress(OSError):
            shutil.rmtree(tier.root / old.name.folder / IMAGES)


def _num_bytes(tier: LocalTier, name: DumpName) -> int:
    with contextlib.suppress(OSError):
        images = tier.root / name.folder / IMAGES
        return sum(path.stat().st_size for path in images.iterdir())
    return 0
