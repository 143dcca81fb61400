"""A dump whose images the run's place has lost, brought back there from a slower tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume, TrainckptError, UnusableSnapshot
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.dumping.old_dumps import why_superseded
from trainckpt.lifecycle.places.everywhere import move, open_everywhere
from trainckpt.lifecycle.places.slower import TIERS, WHERE, where
from trainckpt.lifecycle.run.options import read_options
from trainckpt.process_dump import restore
from trainckpt.process_dump.host import this_host
from trainckpt.snapshot import attempts, flush
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.format.dump import DumpRecord
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place


def bring_home(
    tier: Place, run: str, given: Sequence[str], say: Callable[[str], object]
) -> None:  # fmt: skip
    """Where the run's newest attempt was dumped, and its place has lost that: fetch it.

    Whatever speaks against it is said; then the snapshots are what there is.

    Args:
        tier, run: The run's place, and how it was called.
        given: URLs of tiers that somebody has named.
        say: Told what is done.
    """
    if not isinstance(tier, LocalTier):
        return
    if attempts.run_id(tier) is not None and _is_whole_or_none(tier, given):
        return
    try:
        everywhere = open_everywhere(run, *given)
        name = wanted(everywhere.records)
        if name is None:
            return
        begun = _fetch(everywhere, name)
    except NothingToResume:
        return  # whoever launches says so
    except TrainckptError as error:
        say(f"no dump is restored: {error.message}")
        return
    say(f"{name} was lost in {tier.url}: {begun / 1e6:.1f} MB of it came from other tiers")


def wanted(records: Mapping[int, AttemptRecord]) -> DumpName | None:
    """The dump with which the newest attempt ended. Pure."""
    newest = records.get(max(records, default=0))
    outcome = (newest.outcome or {}) if newest is not None else {}
    name = DumpName.parse(str(outcome.get("snapshot")))
    return None if name is None or why_superseded(name, records) else name


def fetch(everywhere: Everywhere, name: DumpName, sources: Sequence[Tier]) -> int:
    """Make a dump whole in the run's place, and what it lacks: how many bytes were written.

    Raises:
        UnusableSnapshot: no good copy of it, none that is from this host.
        ConfigurationError: the place holds another run.
        SaveFailed, TierUnavailable: a tier refused.
    """
    place, run = everywhere.place, everywhere.run
    sources = [tier for tier in sources if tier is not place]
    if attempts.run_id(place) is None and sources:
        flush.adopt(place, sources[0])
    record = _record(place, sources, run, name)
    num_bytes, snapshot = 0, SnapshotName.parse(record.snapshot)
    if snapshot is not None and not flush.holds(place, snapshot):
        found = [c for c in everywhere.candidates() if c.name == snapshot]
        if not found or found[0].manifest is None:
            raise UnusableSnapshot(f"{name} lacks what {snapshot} holds, and no tier has that")
        num_bytes += move(everywhere, found[0].manifest, place, everywhere.tiers).num_bytes
    return num_bytes + dump_copies.bring(place, sources, run, name)


def _is_whole_or_none(tier: LocalTier, given: Sequence[str]) -> bool:
    """Whether nothing is to be fetched, as far as the place itself tells."""
    records = attempts.read_attempts(tier)
    name = wanted(records)
    if name is None or not (
        given or read_options({}).tiers or any(TIERS in r.facts for r in records.values())
    ):
        return True
    try:
        record = restore.load(tier, attempts.run_id(tier) or "", name)
        return all(
            not dump_copies.check(tier, name.image(image.name), image) for image in record.images
        )
    except TrainckptError:
        return False


def _fetch(everywhere: Everywhere, name: DumpName) -> int:
    """As `fetch`, once it is known that it can be restored here."""
    place = everywhere.place
    sources = [tier for tier in everywhere.tiers if tier is not place]
    record = _record(place, sources, everywhere.run, name)
    told = everywhere.records[name.attempt].facts.get(WHERE)
    why = restore.why_not(record, this_host())
    if not why and told is not None and told != where(place):
        why = f"its processes go on in {str(told)[:200]}, this is {place.url}"
    if why:
        raise UnusableSnapshot(f"{name} is not restored: {why}")
    return fetch(everywhere, name, sources)


def _record(place: Tier, sources: Sequence[Tier], run: str, name: DumpName) -> DumpRecord:
    if attempts.run_id(place) is not None and place.size(name.record) is not None:
        return restore.load(place, run, name)
    return dump_copies.ours(sources, run, name)[0]
