"""Which process dumps a run has, where, and why others are refused: the catalog of dumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.dumping.old_dumps import why_superseded
from trainckpt.process_dump import restore
from trainckpt.process_dump.host import this_host
from trainckpt.snapshot import attempts
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place


@dataclass(frozen=True)
class Dump:
    """A committed dump.

    Attributes:
        reason: Why a resume does not bring it back, or "".
        is_used: It was brought back already.
        tiers: Names of those that hold it.
        is_superseded: No resume will bring it back any more, wherever that is.
    """

    name: DumpName
    record: DumpRecord | None
    reason: str
    is_used: bool = False
    tiers: tuple[str, ...] = ()
    is_superseded: bool = False


def dumps_of(tier: Place) -> list[Dump]:
    """Every dump of the run at a place, newest first."""
    run = attempts.run_id(tier) if isinstance(tier, LocalTier) else None
    if run is None:
        return []
    return _dumps([tier], tier, run, attempts.read_attempts(tier))


def dumps_everywhere(everywhere: Everywhere) -> list[Dump]:
    """Every dump of the run, in whatever tier, newest first."""
    return _dumps(everywhere.tiers, everywhere.place, everywhere.run, everywhere.records)


def _dumps(
    tiers: Sequence[Tier], place: Tier, run: str, records: Mapping[int, AttemptRecord]
) -> list[Dump]:
    named = {tier.name: restore.names_in(tier) for tier in tiers}
    names = sorted({name for each in named.values() for name in each}, reverse=True)
    found = []
    for name in names:
        holders = [tier for tier in tiers if name in named[tier.name]]
        found.append(_look(holders, tiers, place, run, name, records))
    return found


def _look(
    holders: Sequence[Tier],
    tiers: Sequence[Tier],
    place: Tier,
    run: str,
    name: DumpName,
    records: Mapping[int, AttemptRecord],
) -> Dump:
    used = any(record.parent == str(name) for record in records.values())
    superseded = why_superseded(name, records)
    record: DumpRecord | None = None
    reasons, there = list[str](), list[str]()
    for tier in holders:
        try:
            if tier is place:
                record = restore.load(tier, run, name)
                if not superseded and (why := dump_copies.why_not_whole(tier, record)):
                    reasons.append(why)
                    continue
            else:
                found, _ = dump_copies.read_ours(tier, run, name)
                record = record or found
            there.append(tier.name)
        except TrainckptError as error:
            reasons.append(error.message)
    why = superseded
    if not why and record is not None:
        why = restore.why_not(record, this_host()) or _lacks(tiers, record)
    if not why and not there:
        why = "; ".join(reasons)
    return Dump(name, record, why, used, tuple(there), bool(superseded))


def _lacks(tiers: Sequence[Tier], record: DumpRecord) -> str:
    """What was not dumped is in a snapshot."""
    name = SnapshotName.parse(record.snapshot)
    if name is None or any(t.size(f"{name.folder}/{MANIFEST}") is not None for t in tiers):
        return ""
    return f"the snapshot {name}, which holds what it lacks, is gone"
