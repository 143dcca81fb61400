"""Which process dumps a run has, and why others are refused: the catalog of dumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.lifecycle.old_dumps import why_superseded
from trainckpt.process_dump import restore
from trainckpt.process_dump.host import this_host
from trainckpt.snapshot import attempts
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.tiers.places import Place


@dataclass(frozen=True)
class Dump:
    """A committed dump.

    Attributes:
        reason: Why a resume does not bring it back, or "".
        is_used: It was brought back already.
    """

    name: DumpName
    record: DumpRecord | None
    reason: str
    is_used: bool = False


def dumps_of(tier: Place) -> list[Dump]:
    """Every dump of the run at a place, newest first."""
    run = attempts.run_id(tier) if isinstance(tier, LocalTier) else None
    if run is None:
        return []
    records = attempts.read_attempts(tier)
    return [_look(tier, run, name, records) for name in restore.names_in(tier)]


def _look(tier: Place, run: str, name: DumpName, records: dict[int, AttemptRecord]) -> Dump:
    try:
        record = restore.load(tier, run, name)
    except UnusableSnapshot as error:
        return Dump(name, None, error.message)
    used = _used(name, records)
    why = why_superseded(name, records) or restore.why_not(record, this_host())
    return Dump(name, record, why or _lacks(tier, record), used)


def _used(name: DumpName, records: dict[int, AttemptRecord]) -> bool:
    return any(record.parent == str(name) for record in records.values())


def _lacks(tier: Place, record: DumpRecord) -> str:
    """What was not dumped is in a snapshot."""
    name = SnapshotName.parse(record.snapshot)
    if name is None or tier.size(f"{name.folder}/{MANIFEST}") is not None:
        return ""
    return f"the snapshot {name}, which holds what it lacks, is gone"
