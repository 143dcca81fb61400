"""Attempts of a run: who is the newest, and from where each began.

An attempt's number is claimed by creating its record, which only one process can. Two starts at
once get two numbers; the higher one is the newest, and readers fence the other out (`catalog`).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import names, strict, versions
from trainckpt.format.attempt import MAX_BYTES, AttemptRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.tiers.base import Tier

CLAIM_TRIES = 100


def run_id(tier: Tier) -> str | None:
    """The id in the run's record, or None if the place holds no run.

    Raises:
        UnusableSnapshot: the record is damaged, or missing where there are snapshots: taking that
            for an empty place would start the run anew beside them.
    """
    what = names.RUN_RECORD
    if tier.size(what) is None:
        if tier.list(names.SNAPSHOTS):
            raise UnusableSnapshot(
                f"{what} is missing from {tier.url}, which holds snapshots",
                hint="put it back, or name another place for a new run",
            )
        return None
    body = strict.parse(tier.read(what, max_bytes=MAX_BYTES), what, max_bytes=MAX_BYTES)
    run = str(strict.field(body, "id", str, what))
    versions.check_version(body.get("format"), what, versions.RUN_RECORDS)
    if "digest" in body:
        strict.unsealed(body, what)
    return run


def found_run(tier: Tier) -> str:
    """The id of the run at this place; a new run is founded if there is none."""
    existing = run_id(tier)
    if existing is not None:
        return existing
    body = {"format": 1, "id": secrets.token_hex(16)}
    tier.create(names.RUN_RECORD, strict.sealed(body))
    created = run_id(tier)
    if created is None:
        raise TierUnavailable(f"{tier.url} does not keep what is written to it")
    return created


def record_key(attempt: int) -> str:
    """Where the record of an attempt lies."""
    return f"{names.ATTEMPTS}/{attempt}.json"


def read_attempts(tier: Tier) -> dict[int, AttemptRecord]:
    """Every record, by number. A damaged one is an attempt that said nothing, with the reason."""
    found = {}
    for name in tier.list(names.ATTEMPTS):
        number = names.recorded_attempt(name)
        if number is None:
            continue
        try:
            data = tier.read(f"{names.ATTEMPTS}/{name}", max_bytes=MAX_BYTES)
            found[number] = parse(number, data)
        except UnusableSnapshot as error:
            found[number] = AttemptRecord(number, facts={"damaged": error.message})
    return found


def parse(number: int, data: bytes) -> AttemptRecord:
    """The record of that attempt; a damaged one is an attempt that said nothing but why."""
    name = f"{number}.json"
    try:
        record = AttemptRecord.load(data, name)
        why = "" if record.attempt == number else f"{name} is that of {record.attempt}"
    except UnusableSnapshot as error:
        why = error.message
    return AttemptRecord(number, facts={"damaged": why}) if why else record


def newest(tier: Tier) -> int:
    """Number of the newest attempt that was claimed, 0 if none; reads no record."""
    numbers = map(names.recorded_attempt, tier.list(names.ATTEMPTS))
    return max((number for number in numbers if number is not None), default=0)


def claim(tier: Tier, build: Callable[[int], AttemptRecord], above: int = 0) -> AttemptRecord:
    """Claim the next attempt number by creating its record.

    Args:
        tier: The run's place.
        build: Makes the record of a number.
        above: The highest number that slower tiers know of.

    Raises:
        UnusableSnapshot: no number follows.
        TierUnavailable: the place refused, or others were quicker each time.
    """
    for _ in range(CLAIM_TRIES):
        numbers = read_attempts(tier).keys() | _snapshot_attempts(tier)
        last = max(numbers, default=0)
        if (last := max(last, above)) >= names.MAX_ATTEMPT:
            raise UnusableSnapshot(
                f"{tier.url} holds an attempt {last}, which no other can follow",
                hint="remove what bears that number, or name another place for a new run",
            )
        record = build(last + 1)
        if tier.create(record_key(record.attempt), record.dump()):
            return record
    raise TierUnavailable(f"{CLAIM_TRIES} other attempts were claimed in {tier.url} meanwhile")


def replace(tier: Tier, record: AttemptRecord) -> None:
    """Make `record` the attempt's record."""
    tier.replace(record_key(record.attempt), record.dump())


def _snapshot_attempts(tier: Tier) -> set[int]:
    parsed = (names.SnapshotName.parse(name) for name in tier.list(names.SNAPSHOTS))
    return {name.attempt for name in parsed if name is not None}
