"""Free the disk space of dumps that no resume restores any more.

In the run directory the record stays: it is small, and attempts name it as their parent.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.dump import DUMPS, IMAGES, DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.process_dump.encrypted_images import OPENED
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Readable, Tier


@dataclass(frozen=True)
class OldDump:
    """A dump with useless images: its name, the reason, and its size."""

    name: DumpName
    reason: str
    num_bytes: int


def why_superseded(name: DumpName, records: Mapping[int, AttemptRecord]) -> str:
    """Return why no resume restores a dump, whatever its images are; "" if one may. Pure."""
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
    tier: Readable, records: Mapping[int, AttemptRecord], empty: set[DumpName] | None = None
) -> list[OldDump]:
    """Return the old dumps with images, oldest first; not the one being restored right now.

    Args:
        tier, records: The run directory, and the attempts of the run.
        empty: Old dumps known to have no images; updated.
    """
    empty = set() if empty is None else empty
    if not isinstance(tier, LocalTier):
        return []  # no dump is taken there
    newest = records.get(max(records, default=0))
    at_work = newest.parent if newest is not None and newest.outcome is None else None
    found = []
    for name in sorted(n for n in map(DumpName.parse, tier.list(DUMPS)) if n is not None):
        if name in empty or str(name) == at_work:
            continue
        if reason := why_superseded(name, records):
            if files := _files(tier, name):
                num_bytes = sum(tier.size(file) or 0 for file in files)
                found.append(OldDump(name, reason, num_bytes))
            else:
                empty.add(name)
    return found


def remove(tier: Tier, old: OldDump) -> None:
    """Delete its images; denied files stay."""
    with contextlib.suppress(TrainckptError):
        tier.remove_folder(f"{old.name.folder}/{IMAGES}")
        tier.remove_folder(f"{old.name.folder}/{OPENED}")  # left by a killed resume


def _files(tier: Readable, name: DumpName) -> list[str]:
    """Return its images, also those of a killed CRIU that wrote no byte yet."""
    with contextlib.suppress(TrainckptError):
        folders = [f"{name.folder}/{each}" for each in (IMAGES, OPENED)]
        return [f"{folder}/{image}" for folder in folders for image in tier.list(folder)]
    return []
