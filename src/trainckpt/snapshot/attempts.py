"""Attempts of a run: who is the newest, and from where each began.

An attempt's number is claimed by creating its record, which only one process can. Two starts at
once get two numbers; the higher one is the newest, and readers fence the other out (`catalog`).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import names, strict
from trainckpt.format.attempt import MAX_BYTES, AttemptRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.tiers.base import Tier

CLAIM_TRIES = 100


def run_id(tier: Tier) -> str | None:
    """The id in the run's record, or None if the place holds no run."""
    if tier.size(names.RUN_RECORD) is None:
        return None
    body = strict.parse(
        tier.read(names.RUN_RECORD, max_bytes=MAX_BYTES), names.RUN_RECORD, max_bytes=MAX_BYTES
    )
    return str(strict.field(body, "id", str, names.RUN_RECORD))


def found_run(tier: Tier) -> str:
    """The id of the run at this place; a new run is founded if there is none."""
    existing = run_id(tier)
    if existing is not None:
        return existing
    body = {"format": 1, "id": secrets.token_hex(16)}
    tier.create(names.RUN_RECORD, strict.canonical(body))
    created = run_id(tier)
    if created is None:
        raise TierUnavailable(f"{tier.url} does not keep what is written to it")
    return created


def record_key(attempt: int) -> str:
    """Where the record of an attempt lies."""
    return f"{names.ATTEMPTS}/{attempt}.json"


def read_attempts(tier: Tier) -> dict[int, AttemptRecord]:
    """Every readable record, by number. A damaged one counts as an attempt that said nothing."""
    found = {}
    for name in tier.list(names.ATTEMPTS):
        stem, dot, suffix = name.partition(".")
        if not (stem.isdecimal() and dot and suffix == "json"):
            continue
        try:
            data = tier.read(f"{names.ATTEMPTS}/{name}", max_bytes=MAX_BYTES)
            found[int(stem)] = AttemptRecord.load(data, name)
        except UnusableSnapshot:
            found[int(stem)] = AttemptRecord(int(stem))
    return found


def claim(tier: Tier, build: Callable[[int], AttemptRecord]) -> AttemptRecord:
    """Claim the next attempt number by creating its record."""
    for _ in range(CLAIM_TRIES):
        numbers = read_attempts(tier).keys() | _snapshot_attempts(tier)
        record = build(max(numbers, default=0) + 1)
        if tier.create(record_key(record.attempt), record.dump()):
            return record
    raise TierUnavailable(f"{CLAIM_TRIES} other attempts were claimed in {tier.url} meanwhile")


def replace(tier: Tier, record: AttemptRecord) -> None:
    """Make `record` the attempt's record."""
    tier.replace(record_key(record.attempt), record.dump())


def _snapshot_attempts(tier: Tier) -> set[int]:
    parsed = (names.SnapshotName.parse(name) for name in tier.list(names.SNAPSHOTS))
    return {name.attempt for name in parsed if name is not None}
