"""Histories: the attempts of a run as its place knows them, and as a slower tier does.

Numbers are claimed in the run's place. One that was away while the run went on from a tier (a
host's own disk, a backup that was put back) lacks attempts; two that went on by themselves gave
one number to two attempts, a fork.

    the place lacks some     they are brought to it, as they are
    a fork, one side of      gives way: where both have a number its record goes, and where it
    which saved nothing      alone has one that attempt is no branch any more
    a fork, both have saved  an error: neither is older than the other
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format import names
from trainckpt.format.attempt import MAX_BYTES, UNDECIDED, AttemptRecord
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import attempts
from trainckpt.tiers.patience import answer_within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.tiers.base import Readable, Tier


@dataclass(frozen=True)
class Theirs:
    """What a tier knows of the run's attempts, as far as it differs from what the place does.

    Attributes:
        tier: Which.
        newest: The highest number that a record or a snapshot bears there.
        raw: Number -> the record's bytes, of attempts that the place lacks or has others of.
        records: The same, read.
        fork: The lowest number that is of two attempts; None if none is.
        saved: Something of these was committed.
    """

    tier: Readable
    newest: int
    raw: Mapping[int, bytes]
    records: Mapping[int, AttemptRecord]
    fork: int | None
    saved: bool


def read_theirs(tier: Readable, ours: Mapping[int, AttemptRecord]) -> Theirs:
    """Compare a tier's history with that of the run's place, the newest first.

    What both have of the newest attempt they share says that they agree on all before it.

    Raises:
        TierUnavailable: the tier refused, or a call took too long.
    """
    listed = answer_within(tier.url, lambda: tier.list(names.ATTEMPTS))
    numbers = {n for n in map(names.recorded_attempt, listed) if n is not None}
    found = answer_within(tier.url, lambda: tier.list(names.SNAPSHOTS))
    borne = {name.attempt for name in map(SnapshotName.parse, found) if name is not None}
    raw = {n: data for n in sorted(numbers - ours.keys()) if (data := _read(tier, n)) is not None}
    fork = None
    for number in sorted(numbers & ours.keys(), reverse=True):
        data = _read(tier, number)
        same = None if data is None else is_same(ours[number], attempts.parse(number, data))
        if same:
            break
        if data is not None and same is False:
            raw[number], fork = data, number
    records = {number: attempts.parse(number, data) for number, data in raw.items()}
    newer = {number: record for number, record in records.items() if number >= (fork or 0)}
    saved = bool(newer) and answer_within(tier.url, lambda: has_saved(tier, newer))
    return Theirs(tier, max(numbers | borne, default=0), raw, records, fork, saved)


def bring(place: Tier, ours: Mapping[int, AttemptRecord], theirs: Theirs) -> list[int]:
    """Let the place know what the tier does.

    A crash between two writes leaves what the next start takes for the same.

    Returns:
        Of which attempts something was written.

    Raises:
        ConfigurationError: a fork, and both sides have saved.
    """
    own = {n: r for n, r in ours.items() if theirs.fork is not None and n >= theirs.fork}
    kept = bool(own) and has_saved(place, own)
    if theirs.fork is not None and kept and theirs.saved:
        raise forked(place, theirs.tier, theirs.fork)
    written = []
    for number in () if kept else sorted(own.keys() - theirs.raw.keys(), reverse=True):
        if own[number].parent != UNDECIDED:
            attempts.replace(place, own[number].with_(parent=UNDECIDED))
            written.append(number)
    for number in () if kept else sorted(own.keys() & theirs.raw.keys()):
        place.replace(attempts.record_key(number), theirs.raw[number])
        written.append(number)
    for number in sorted(theirs.raw.keys() - ours.keys()):
        data = theirs.raw[number]
        if kept and theirs.fork is not None and number > theirs.fork:
            data = theirs.records[number].with_(parent=UNDECIDED).dump()
        if place.create(attempts.record_key(number), data):
            written.append(number)
    return written


def must_not_replace(
    place: Readable, tier: Readable, number: int, ours: bytes, theirs: bytes
) -> None:
    """Refuse to write a record over that of another attempt, unless that one saved nothing.

    Raises:
        ConfigurationError: it has.
    """
    there = attempts.parse(number, theirs)
    if is_same(attempts.parse(number, ours), there) is False and has_saved(tier, {number: there}):
        raise forked(place, tier, number)


def forked(place: Readable, tier: Readable, number: int) -> ConfigurationError:
    """Two copies of the run have gone on, each with attempts of its own."""
    return ConfigurationError(
        f"attempt {number} in {place.url} is not attempt {number} in the tier {tier.name} at "
        f"{tier.url}: two copies of this run went on, and what both saved does not go together",
        hint=f"to go on from what the tier holds, move {place.url} away; to go on from what that "
        "holds, name other tiers",
    )


def is_same(one: AttemptRecord, other: AttemptRecord) -> bool | None:
    """Whether records of one number are of one attempt; None if they do not tell. Pure."""
    told = [record.facts.get("started") for record in (one, other)]
    return None if None in told else told[0] == told[1]


def has_saved(tier: Readable, records: Mapping[int, AttemptRecord]) -> bool:
    """Whether one of these attempts has committed anything, as the records or the tier say."""
    for number, record in records.items():
        for spelled in (record.newest_commit, (record.outcome or {}).get("snapshot")):
            name = SnapshotName.parse(spelled or "") or DumpName.parse(spelled or "")
            if name is not None and name.attempt == number:
                return True
    found = map(SnapshotName.parse, tier.list(names.SNAPSHOTS))
    own = [name for name in found if name is not None and name.attempt in records]
    return any(tier.size(f"{name.folder}/{names.MANIFEST}") is not None for name in own)


def _read(tier: Readable, number: int) -> bytes | None:
    """The record's bytes; None if it cannot be one."""
    key = attempts.record_key(number)
    with contextlib.suppress(UnusableSnapshot):
        return answer_within(tier.url, lambda: tier.read(key, max_bytes=MAX_BYTES))
    return None
