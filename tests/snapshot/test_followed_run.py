"""A live attempt follows its run: what was read stays known, and nothing is deleted unread."""

from __future__ import annotations

import itertools

import pytest

from tests.snapshot.written import committed, referring, shard_path, written
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.format.names import MANIFEST, SNAPSHOTS
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.followed_run import IN_TURN, NEWEST, FollowedRun
from trainckpt.snapshot.prune import prune_by_policy
from trainckpt.storage.local import LocalTier

LIVE = 4


class CountingTier(LocalTier):
    """Counts what is looked at and read."""

    calls = 0

    def size(self, key):
        self.calls += 1
        return super().size(key)

    def read(self, key, *, max_bytes):
        self.calls += 1
        return super().read(key, max_bytes=max_bytes)

    def list(self, folder):
        self.calls += 1
        return super().list(folder)


@pytest.fixture
def tier(tmp_path):
    return CountingTier(tmp_path)


def record(tier, number, parent):
    tier.replace(attempt_history.record_key(number), AttemptRecord(number, parent).dump())


def a_run(tier):
    """Snapshots of each kind: two branches, garbage, a tag, references, one that is damaged."""
    record(tier, 1, None)
    record(tier, 2, "s2~1.2")
    record(tier, 3, UNDECIDED)
    record(tier, LIVE, "s4~2.2")
    first = committed(tier, "s1~1.1")
    committed(tier, "s2~1.2", tags=("best",))
    committed(tier, "s3~1.3")
    referring(tier, "s3~2.1", {"model/weight": first})
    for text in ("s4~2.2", "s5~2.3", "s5~4.1", "s6~4.2", "s7~4.3", "s8~4.4", "s9~4.5"):
        committed(tier, text)
    written(tier, "s6~2.4")
    (tier.root / SNAPSHOTS / "s5~4.1" / MANIFEST).write_bytes(b"{}")


def followed(tier):
    return FollowedRun(tier, tier, "run")


def look(run):
    return run.candidates(run.attempts(LIVE))


def lose(tier, text):
    (tier.root / SNAPSHOTS / text / MANIFEST).unlink()


def unusable(found):
    return {str(c.name) for c in found if not c.usable}


def test_each_look_finds_what_the_catalog_has(tier):
    a_run(tier)
    run = followed(tier)
    for number in range(6):
        plain = read_catalog(tier, "run", attempt_history.read_attempts(tier))
        for mine, other in itertools.zip_longest(look(run), plain):
            assert (mine.name, mine.usable, mine.reason) == (other.name, other.usable, other.reason)
            assert mine.tiers == other.tiers
            assert (mine.manifest is None) == (other.manifest is None)
        assert {n: r.parent for n, r in run.attempts(LIVE).items()}.keys() == {1, 2, 3, LIVE}
        committed(tier, f"s{10 + number}~4.{6 + number}")


def calls_of_a_look(tmp_path, snapshots, attempts):
    tier = CountingTier(tmp_path / f"{snapshots}-{attempts}")
    for number in range(1, attempts + 1):
        record(tier, number, None if number == 1 else f"s1~{number - 1}.1")
    for number in range(1, snapshots + 1):
        committed(tier, f"s{number}~{attempts}.{number}")
    run = followed(tier)
    run.candidates(run.attempts(attempts))
    counted = []
    for number in range(snapshots + 1, snapshots + 4):
        committed(tier, f"s{number}~{attempts}.{number}")
        tier.calls = 0
        run.candidates(run.attempts(attempts))
        counted.append(tier.calls)
    return counted


def test_a_look_costs_the_same_with_more_snapshots_and_attempts(tmp_path):
    few = calls_of_a_look(tmp_path, NEWEST + IN_TURN, 1)
    assert len(set(few)) == 1
    assert few == calls_of_a_look(tmp_path, 60, 1)
    assert few == calls_of_a_look(tmp_path, NEWEST + IN_TURN, 30)


@pytest.mark.parametrize("age", range(NEWEST))
def test_one_of_the_newest_that_is_lost_is_seen_at_once(tier, age):
    for number in range(1, 21):
        committed(tier, f"s{number}~4.{number}")
    run = followed(tier)
    look(run)
    lose(tier, f"s{20 - age}~4.{20 - age}")
    assert unusable(look(run)) == {f"s{20 - age}~4.{20 - age}"}


@pytest.mark.parametrize("lost", [1, 9, 17])
def test_any_that_is_lost_is_seen_within_one_turn(tier, lost):
    for number in range(1, 21):
        committed(tier, f"s{number}~4.{number}")
    run = followed(tier)
    look(run)
    lose(tier, f"s{lost}~4.{lost}")
    looks = [unusable(look(run)) for _ in range(-(-(20 - NEWEST) // IN_TURN))]
    assert looks[-1] == {f"s{lost}~4.{lost}"}


def prune(run, keep_last):
    prune_by_policy(run, run.attempts(LIVE), keep_last=keep_last, attempt=LIVE)


def test_a_damaged_one_is_not_deleted_on_the_strength_of_what_it_was(tier):
    for number in range(1, 21):
        committed(tier, f"s{number}~4.{number}")
    run = followed(tier)
    prune(run, 20)
    shard_path(tier, "s9~4.9").write_bytes(b"short")
    prune(run, 9)
    kept = {f"s{number}~4.{number}" for number in range(12, 21)}
    assert set(tier.list(SNAPSHOTS)) == kept | {"s9~4.9"}


def test_a_folder_that_stays_for_others_is_no_snapshot_any_more(tier):
    first = committed(tier, "s1~4.1")
    for number in range(2, 12):
        referring(tier, f"s{number}~4.{number}", {"model/weight": first})
    run = followed(tier)
    prune(run, 11)
    prune(run, 10)
    assert tier.list("snapshots/s1~4.1") == ["rank00000.safetensors"]
    assert "s1~4.1" not in {str(c.name) for c in look(run)}
    assert len(look(run)) == 10
