"""Keep the records of all attempts of a run, in its run directory and in slower tiers.

An attempt claims its number by exclusively creating its record. Two simultaneous starts get two
numbers; the higher one is the newest, and readers fence the other out (`catalog`).

Numbers are claimed in the run directory. It can lag behind a tier: a host's own disk, a restored
backup. Two directories continued independently give one number to two attempts: a fork.

    the run directory lacks  they are copied to it unchanged
    some records
    a fork, one side of      gives way: the other side's record replaces its own of the same
    which saved nothing      number, and its extra attempts stop being a branch
    a fork, both have saved  an error: neither is older than the other

`read_theirs` compares the two histories, and `bring` writes the outcome to the run directory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, TierUnavailable, UnusableSnapshot
from trainckpt.format import json_io, names
from trainckpt.format.attempt_record import MAX_BYTES, UNDECIDED, AttemptRecord
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.storage.base import num_looks
from trainckpt.storage.worker_pool import answer_within, call_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.storage.base import Readable, Tier


CLAIM_TRIES = 100


def run_id(tier: Tier) -> str | None:
    """Return the id in the run's record, or None if the run directory holds no run.

    Raises:
        UnusableSnapshot: the record is damaged, or missing beside snapshots. Treating that as an
            empty directory would start a new run beside them.
    """
    what = names.RUN_RECORD
    if tier.size(what) is None:
        if tier.list(names.SNAPSHOTS):
            raise UnusableSnapshot(
                f"{what} is missing from {tier.url}, which holds snapshots",
                hint="restore that file, or name another run directory for a new run",
            )
        return None
    body = json_io.parse(tier.read(what, max_bytes=MAX_BYTES), what, max_bytes=MAX_BYTES)
    run = str(json_io.field(body, "id", str, what))
    names.check_version(body.get("format"), what, names.RUN_RECORDS)
    if "digest" in body:
        json_io.verify_digest(body, what)
    return run


def found_run(tier: Tier) -> str:
    """Return the run's id; create a new run if there is none."""
    existing = run_id(tier)
    if existing is not None:
        return existing
    body = {"format": 1, "id": secrets.token_hex(16)}
    tier.create(names.RUN_RECORD, json_io.with_digest(body))
    created = run_id(tier)
    if created is None:
        raise TierUnavailable(f"{tier.url} accepted a new file, but does not hold it")
    return created


def record_key(attempt: int) -> str:
    """Return the key of an attempt's record."""
    return f"{names.ATTEMPTS}/{attempt}.json"


def read_attempts(tier: Tier) -> dict[int, AttemptRecord]:
    """Return every record by number; a damaged one is empty but for the reason."""
    found = RecordsAsNeeded(tier)
    calls = [partial(found.__getitem__, number) for number in found]
    call_all(calls, num_looks([tier]), "trainckpt-look")
    return dict(found)


class RecordsAsNeeded(Mapping[int, AttemptRecord]):
    """The records of all attempts, as from `read_attempts`; each is read at its first use."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self._numbers = tier, dict.fromkeys(numbers(tier))
        self._read: dict[int, AttemptRecord] = {}

    def __getitem__(self, number: int) -> AttemptRecord:
        if number not in self._numbers:
            raise KeyError(number)
        if number not in self._read:
            self._read[number] = read_listed(self._tier, number)
        return self._read[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def read_attempt(tier: Tier, number: int) -> AttemptRecord | None:
    """Return one record as `read_attempts`, or None if there is none."""
    if number < 1 or tier.size(record_key(number)) is None:
        return None
    return read_listed(tier, number)


def numbers(tier: Tier) -> list[int]:
    """Return the numbers of all claimed attempts; reads no record."""
    listed = map(names.recorded_attempt, tier.list(names.ATTEMPTS))
    return [number for number in listed if number is not None]


def read_listed(tier: Tier, number: int) -> AttemptRecord:
    """Return the record of a claimed attempt; a damaged one is empty but for the reason."""
    try:
        return parse(number, tier.read(record_key(number), max_bytes=MAX_BYTES))
    except UnusableSnapshot as error:
        return AttemptRecord(number, facts={"damaged": error.message})


def parse(number: int, data: bytes) -> AttemptRecord:
    """Parse an attempt's record; a damaged one is empty but for the reason."""
    name = f"{number}.json"
    try:
        record = AttemptRecord.load(data, name)
        why = "" if record.attempt == number else f"{name} is that of {record.attempt}"
    except UnusableSnapshot as error:
        why = error.message
    return AttemptRecord(number, facts={"damaged": why}) if why else record


def newest(tier: Tier) -> int:
    """Return the number of the newest claimed attempt, 0 if none; reads no record."""
    return max(numbers(tier), default=0)


def claim(tier: Tier, build: Callable[[int], AttemptRecord], above: int = 0) -> AttemptRecord:
    """Claim the next attempt number by creating its record.

    Args:
        tier: The run directory.
        build: Makes the record for a number.
        above: The highest number known in slower tiers.

    Raises:
        UnusableSnapshot: the largest number is taken.
        TierUnavailable: the tier refused, or other attempts won every try.
    """
    for _ in range(CLAIM_TRIES):
        last = max({*numbers(tier), *_snapshot_attempts(tier)}, default=0)
        if (last := max(last, above)) >= names.MAX_ATTEMPT:
            raise UnusableSnapshot(
                f"{tier.url} holds attempt {last}, the largest number, so no attempt can follow",
                hint="remove the files of that attempt, or name another run directory",
            )
        record = build(last + 1)
        if tier.create(record_key(record.attempt), record.dump()):
            return record
    raise TierUnavailable(f"other starts claimed {CLAIM_TRIES} attempts in {tier.url} meanwhile")


def replace(tier: Tier, record: AttemptRecord) -> None:
    """Overwrite the attempt's record with `record`."""
    tier.replace(record_key(record.attempt), record.dump())


def _snapshot_attempts(tier: Tier) -> set[int]:
    parsed = (names.SnapshotName.parse(name) for name in tier.list(names.SNAPSHOTS))
    return {name.attempt for name in parsed if name is not None}


@dataclass(frozen=True)
class OtherHistory:
    """Differences between a tier's history of attempts and the run directory's.

    Attributes:
        tier: The tier.
        newest: The highest number of a record or snapshot there.
        raw: Number -> record bytes, for attempts missing or different in the run directory.
        records: The same, parsed.
        fork: The lowest number shared by two different attempts; None: there is no fork.
        saved: True if the tier has commits of those records, from the fork on.
    """

    tier: Readable
    newest: int
    raw: Mapping[int, bytes]
    records: Mapping[int, AttemptRecord]
    fork: int | None
    saved: bool


def read_theirs(tier: Readable, ours: Mapping[int, AttemptRecord]) -> OtherHistory:
    """Compare a tier's history with the run directory's, newest attempt first.

    If both have the same newest shared attempt, they agree on all attempts before it.

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
        same = None if data is None else is_same(ours[number], parse(number, data))
        if same:
            break
        if data is not None and same is False:
            raw[number], fork = data, number
    records = {number: parse(number, data) for number, data in raw.items()}
    newer = {number: record for number, record in records.items() if number >= (fork or 0)}
    saved = bool(newer) and answer_within(tier.url, lambda: has_saved(tier, newer))
    return OtherHistory(
        tier=tier,
        newest=max(numbers | borne, default=0),
        raw=raw,
        records=records,
        fork=fork,
        saved=saved,
    )


def bring(run_tier: Tier, ours: Mapping[int, AttemptRecord], theirs: OtherHistory) -> list[int]:
    """Merge the tier's history into the run directory.

    A crash between two writes leaves differences, so the next start repeats the merge.

    Returns:
        Attempts of which a record was written.

    Raises:
        ConfigurationError: a fork, and both sides have saved.
    """
    own = {n: r for n, r in ours.items() if theirs.fork is not None and n >= theirs.fork}
    kept = bool(own) and has_saved(run_tier, own)
    if theirs.fork is not None and kept and theirs.saved:
        raise forked(run_tier, theirs.tier, theirs.fork)
    written = []
    for number in () if kept else sorted(own.keys() - theirs.raw.keys(), reverse=True):
        if own[number].parent != UNDECIDED:
            replace(run_tier, own[number].with_(parent=UNDECIDED))
            written.append(number)
    for number in () if kept else sorted(own.keys() & theirs.raw.keys()):
        run_tier.replace(record_key(number), theirs.raw[number])
        written.append(number)
    for number in sorted(theirs.raw.keys() - ours.keys()):
        data = theirs.raw[number]
        if kept and theirs.fork is not None and number > theirs.fork:
            data = theirs.records[number].with_(parent=UNDECIDED).dump()
        if run_tier.create(record_key(number), data):
            written.append(number)
    return written


def must_not_replace(
    run_tier: Readable, tier: Readable, number: int, ours: bytes, theirs: bytes
) -> None:
    """Refuse to overwrite the record of another attempt that has saved.

    Raises:
        ConfigurationError: it has.
    """
    there = parse(number, theirs)
    if is_same(parse(number, ours), there) is False and has_saved(tier, {number: there}):
        raise forked(run_tier, tier, number)


def forked(run_tier: Readable, tier: Readable, number: int) -> ConfigurationError:
    """Return the error for two copies of the run with attempts of their own."""
    return ConfigurationError(
        f"attempt {number} in {run_tier.url} differs from attempt {number} in the tier "
        f"{tier.name} at {tier.url}: two copies of this run have trained, and their snapshots must "
        "not be mixed",
        hint=f"to resume from the tier, move {run_tier.url} away; to resume from the run "
        "directory, name other tiers",
    )


def is_same(one: AttemptRecord, other: AttemptRecord) -> bool | None:
    """Return True if two records of one number are of one attempt; None if unknown. Pure."""
    starts = [record.facts.get("started") for record in (one, other)]
    return None if None in starts else starts[0] == starts[1]


def has_saved(tier: Readable, records: Mapping[int, AttemptRecord]) -> bool:
    """Return True if one of these attempts has committed, as its record or the tier shows."""
    for number, record in records.items():
        for spelled in (record.newest_commit, (record.outcome or {}).get("snapshot")):
            name = SnapshotName.parse(spelled or "") or DumpName.parse(spelled or "")
            if name is not None and name.attempt == number:
                return True
    found = map(SnapshotName.parse, tier.list(names.SNAPSHOTS))
    own = [name for name in found if name is not None and name.attempt in records]
    return any(tier.size(f"{name.folder}/{names.MANIFEST}") is not None for name in own)


def _read(tier: Readable, number: int) -> bytes | None:
    """Return the record's bytes; None if it is unreadable or too long."""
    key = record_key(number)
    with contextlib.suppress(UnusableSnapshot):
        return answer_within(tier.url, lambda: tier.read(key, max_bytes=MAX_BYTES))
    return None
