"""The process dumps in a run directory, and why one cannot be restored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.dumping.old_dumps import why_superseded
from trainckpt.errors import TrainckptError
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.process_dump import restore
from trainckpt.process_dump.dump import this_host
from trainckpt.run_directory.tier_config import is_copy
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.storage.base import Tier


@dataclass(frozen=True)
class Dump:
    """A committed dump.

    Attributes:
        name, record: Its name; its record if that is readable.
        reason: Why a resume does not restore it, or "".
        is_used: It was restored already.
        is_superseded: No resume restores it any more, on whatever host.
    """

    name: DumpName
    record: DumpRecord | None
    reason: str
    is_used: bool = False
    is_superseded: bool = False


def dumps_of(tier: Tier) -> list[Dump]:
    """Return every dump of the run at a place, newest first.

    Earlier versions copied dumps to slower tiers; no resume restores such a copy.
    """
    run = attempt_history.run_id(tier) if isinstance(tier, LocalTier) else None
    if run is None:
        return []
    records = attempt_history.read_attempts(tier)
    if is_copy(records, tier):
        return []
    return [_inspect(tier, run, name, records) for name in restore.names_in(tier)]


def _inspect(tier: Tier, run: str, name: DumpName, records: Mapping[int, AttemptRecord]) -> Dump:
    is_used = any(record.parent == str(name) for record in records.values())
    superseded = why_superseded(name, records)
    record, reason = None, ""
    try:
        record = restore.load(tier, run, name)
        reason = "" if superseded else _why_not(tier, record)
    except TrainckptError as error:
        reason = error.message
    return Dump(name, record, superseded or reason, is_used, bool(superseded))


def _why_not(tier: Tier, record: DumpRecord) -> str:
    """Return why a dump cannot be restored here, or ""."""
    if reason := restore.why_not(record, this_host()):
        return reason
    snapshot = SnapshotName.parse(record.snapshot)
    if snapshot is not None and tier.size(f"{snapshot.folder}/{MANIFEST}") is None:
        return f"the snapshot {snapshot}, which holds what it lacks, is gone"
    for image in record.images:
        path = Path(tier.url) / record.name.image(image.name)
        if reason := restore.why_incomplete(path, image):
            return f"the image {image.name} {reason}"
    return ""
