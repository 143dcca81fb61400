"""Histories: what a tier knows of attempts is brought to a place that was away, and no two
attempts become one."""

from __future__ import annotations

from threading import Event

import pytest

from tests.snapshot.written import committed
from trainckpt.errors import ConfigurationError, TierUnavailable
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.snapshot import attempt_history, catalog, tier_copy
from trainckpt.storage import worker_pool
from trainckpt.storage.local import LocalTier


@pytest.fixture
def places(tmp_path):
    """The run's place, and a slower tier of it."""
    place, tier = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slow")
    tier.name = "slow"
    return place, tier


def record(number, host, parent=None, newest=None):
    facts = {"started": float(number) + (0.5 if host == "b" else 0.0)}
    return AttemptRecord(number, parent, newest_commit=newest, facts=facts)


def put(tier, *records):
    for each in records:
        attempt_history.replace(tier, each)


def brought(place, tier):
    ours = attempt_history.read_attempts(place)
    theirs = attempt_history.read_theirs(tier, ours)
    return attempt_history.bring(place, ours, theirs), theirs.newest


def raw(tier):
    return {name: tier.read(f"attempts/{name}", max_bytes=9999) for name in tier.list("attempts")}


FIRST = record(1, "a", newest="s6~1.6")


def test_a_place_that_was_away_gets_the_records_that_it_lacks_and_keeps_its_own(places):
    place, tier = places
    put(place, FIRST.with_(state="ended"))
    put(tier, FIRST, record(2, "b", "s6~1.6", "s9~2.3"), record(3, "b", "s9~2.3"))
    before = raw(place)["1.json"]
    assert brought(place, tier) == ([2, 3], 3)
    assert raw(place) == {**raw(tier), "1.json": before}
    assert brought(place, tier) == ([], 3)


def test_a_snapshot_of_a_tier_bears_a_number_too(places):
    place, tier = places
    committed(tier, "s1~4.1")
    assert brought(place, tier) == ([], 4)
    assert attempt_history.claim(place, AttemptRecord, above=4).attempt == 5


def test_what_the_newest_shared_attempt_agrees_on_is_not_read_again(places, monkeypatch):
    place, tier = places
    put(place, *(record(number, "a") for number in range(1, 50)))
    tier_copy.mirror_records(place, tier, {})
    asked, read = [], tier.read
    monkeypatch.setattr(tier, "read", lambda key, **how: asked.append(key) or read(key, **how))
    assert brought(place, tier) == ([], 49)
    assert asked == ["attempts/49.json"]


def test_attempts_here_that_saved_nothing_give_way_to_those_of_a_tier(places):
    """They failed while the tier was away; what they began from is not the run's newest."""
    place, tier = places
    put(place, FIRST, *(record(number, "a", "s6~1.6") for number in (2, 3)))
    put(tier, FIRST, record(2, "b", "s6~1.6", "s9~2.3"))
    assert brought(place, tier) == ([3, 2], 2)
    now = attempt_history.read_attempts(place)
    assert now[2].newest_commit == "s9~2.3"
    assert now[3] == record(3, "a", UNDECIDED).with_(facts=now[3].facts)
    assert catalog.ancestry(now, [])[2] == float("inf")


def test_attempts_of_a_tier_that_saved_nothing_give_way_to_those_here(places):
    place, tier = places
    put(place, FIRST, record(2, "a", "s6~1.6", "s9~2.3"))
    put(tier, FIRST, *(record(number, "b", "s6~1.6") for number in (2, 3)))
    assert brought(place, tier) == ([3], 3)
    now = attempt_history.read_attempts(place)
    assert now[2].newest_commit == "s9~2.3"
    assert catalog.ancestry(now, [])[2] == float("inf")
    tier_copy.mirror_records(place, tier, {})
    assert raw(tier) == raw(place)


@pytest.mark.parametrize("by", ["the record", "a snapshot"])
def test_two_histories_that_both_saved_are_refused_and_nothing_is_changed(places, by):
    place, tier = places
    newest = "s9~2.3" if by == "the record" else None
    put(place, FIRST, record(2, "a", "s6~1.6", newest))
    put(tier, FIRST, record(2, "b", "s6~1.6", newest), record(3, "b", "s9~2.3"))
    if by == "a snapshot":
        committed(place, "s9~2.3")
        committed(tier, "s9~2.3")
    before = raw(place), raw(tier)
    with pytest.raises(ConfigurationError, match="differs from attempt 2 in") as refused:
        brought(place, tier)
    assert "name other tiers" in refused.value.hint
    with pytest.raises(ConfigurationError, match="two copies of this run have trained"):
        tier_copy.mirror_records(place, tier, {})
    assert (raw(place), raw(tier)) == before


def test_a_record_that_is_damaged_or_says_no_start_is_no_fork(places):
    place, tier = places
    put(place, FIRST, record(2, "a", newest="s9~2.3"), AttemptRecord(3, newest_commit="s9~3.3"))
    put(tier, FIRST, record(3, "b", newest="s9~3.4"))
    tier.replace("attempts/2.json", b"{")
    assert brought(place, tier) == ([], 3)


def test_a_tier_that_hangs_is_not_waited_for(places, monkeypatch):
    place, tier = places
    hangs = Event()
    monkeypatch.setattr(worker_pool, "ANSWER_WITHIN_S", 0.05)
    monkeypatch.setattr(tier, "list", lambda folder: hangs.wait(60) and [])
    try:
        with pytest.raises(TierUnavailable, match="did not answer"):
            brought(place, tier)
    finally:
        hangs.set()
