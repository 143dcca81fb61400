"""Attempts: one number each; a run's record that is lost is not a new run."""

from __future__ import annotations

import threading

import pytest

from tests.snapshot.written import committed
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.storage.local import LocalTier


def test_many_claims_at_once_get_as_many_numbers(tmp_path):
    tier, barrier, claimed = LocalTier(tmp_path), threading.Barrier(8), []

    def claim():
        barrier.wait()
        claimed.append(attempt_history.claim(tier, AttemptRecord).attempt)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))


def test_many_founders_at_once_found_one_run(tmp_path):
    tier, barrier, found = LocalTier(tmp_path), threading.Barrier(8), set()

    def found_run():
        barrier.wait()
        found.add(attempt_history.found_run(tier))

    threads = [threading.Thread(target=found_run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {attempt_history.run_id(tier)}


def test_a_number_that_a_snapshot_bears_is_not_claimed_again(tmp_path):
    """The records may be lost; the snapshots of attempt 3 are not to be mixed with new ones."""
    tier = LocalTier(tmp_path)
    committed(tier, "s1~3.1")
    assert attempt_history.claim(tier, AttemptRecord).attempt == 4


def test_a_damaged_record_is_an_attempt_that_said_nothing_but_why(tmp_path):
    tier = LocalTier(tmp_path)
    attempt_history.claim(tier, lambda n: AttemptRecord(n, "s1~0.1"))
    path = tmp_path / "attempts" / "1.json"
    path.write_bytes(path.read_bytes().replace(b"s1~0.1", b"s1~0.3"))
    record = attempt_history.read_attempts(tier)[1]
    assert record.parent == UNDECIDED
    assert "does not match its own digest" in record.facts["damaged"]


def test_files_that_are_no_records_are_left_alone(tmp_path):
    tier = LocalTier(tmp_path)
    for name in ("x.json", "1", "2.json.bak", "1-token.txt"):
        tier.write(f"attempts/{name}", [memoryview(b"?")])
    assert attempt_history.read_attempts(tier) == {}


def test_a_place_without_anything_holds_no_run(tmp_path):
    assert attempt_history.run_id(LocalTier(tmp_path / "nowhere")) is None


def test_snapshots_without_a_run_s_record_are_no_new_run(tmp_path):
    tier = LocalTier(tmp_path)
    committed(tier, "s1~1.1")
    tier.remove("run.json")
    for ask in (attempt_history.run_id, attempt_history.found_run):
        with pytest.raises(UnusableSnapshot, match=r"run\.json is missing"):
            ask(tier)
    assert tier.size("run.json") is None


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"id":3}', b"\xff", b'{"format":6,"id":"x"}']
)
def test_a_damaged_run_s_record_is_an_error_and_never_a_new_run(tmp_path, data):
    tier = LocalTier(tmp_path)
    tier.create("run.json", data)
    with pytest.raises(UnusableSnapshot):
        attempt_history.found_run(tier)
    assert tier.read("run.json", max_bytes=100) == data


def test_every_flipped_bit_of_a_run_s_record_is_found_or_changes_nothing(tmp_path):
    run = attempt_history.found_run(LocalTier(tmp_path))
    path = tmp_path / "run.json"
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert attempt_history.run_id(LocalTier(tmp_path)) == run
        except UnusableSnapshot:
            pass


def test_a_record_is_read_when_it_is_needed_and_once(tmp_path, monkeypatch):
    tier, read = LocalTier(tmp_path), []
    for _ in range(30):
        attempt_history.claim(tier, lambda n: AttemptRecord(n, f"s1~{n - 1}.1"))
    load = attempt_history.read_listed
    monkeypatch.setattr(
        attempt_history, "read_listed", lambda tier, n: read.append(n) or load(tier, n)
    )
    needed = attempt_history.RecordsAsNeeded(tier)
    assert sorted(needed) == [*range(1, 31)]
    assert needed.get(31) is None
    assert needed[30] is needed[30]
    assert needed[30].parent == "s1~29.1"
    assert catalog.ancestry(needed, [], 29) == {30: float("inf"), 29: 1}
    assert read == [30, 29]
    assert dict(needed) == attempt_history.read_attempts(tier)
