"""Which process dumps a run has, and why others are refused: the catalog of dumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import SnapshotName
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
    why = used or _why_not(name, records) or restore.why_not(record, this_host())
    return Dump(name, record, why, bool(used))


def _used(name: DumpName, records: dict[int, AttemptRecord]) -> str:
    for number, record in sorted(records.items()):
        if record.parent == str(name):
            how = (record.outcome or {}).get("outcome")
            return f"attempt {number} went on from it{f' and {how}' if how else ''}"
    return ""


def _why_not(name: DumpName, records: dict[int, AttemptRecord]) -> str:
    later = max(records, default=0)
    if later > name.attempt:
        return f"attempt {later} began later"
    newest = SnapshotName.parse(records[later].newest_commit or "") if later in records else None
    if newest is not None and (newest.attempt, newest.sequence) > (name.attempt, name.sequence):
        return f"{newest} was committed later"
    return ""
