"""Prune: what goes, what stays, and in which order."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.power import RecordingDisk
from tests.snapshot.written import committed, written
from trainckpt.errors import TierUnavailable
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.catalog import ABANDONED, NOT_COMMITTED, Candidate, read_catalog
from trainckpt.snapshot.prune import plan_prune, prune
from trainckpt.storage.local import Disk, LocalTier

RECORDS = {1: AttemptRecord(1, None), 2: AttemptRecord(2, "s2~1.2")}


def place(tmp_path, *texts, tagged=()):
    tier = LocalTier(tmp_path)
    for text in texts:
        committed(tier, text, ("best",) if text in tagged else ())
    return tier


def doomed(tier, keep_last, attempt=2, keep=()):
    found = read_catalog(tier, "run", RECORDS)
    plan = plan_prune(found, keep_last=keep_last, attempt=attempt, keep=keep)
    return sorted(map(str, plan))


def test_the_newest_usable_ones_are_kept(tmp_path):
    tier = place(tmp_path, "s1~1.1", "s2~1.2", "s3~2.1", "s4~2.2")
    assert doomed(tier, 3) == ["s1~1.1"]
    assert doomed(tier, 1) == ["s1~1.1", "s2~1.2", "s3~2.1"]
    assert doomed(tier, 0) == doomed(tier, 1)  # the newest usable one never goes
    assert doomed(tier, 1, keep=["s1~1.1"]) == ["s2~1.2", "s3~2.1"]


def test_a_tagged_one_is_kept_besides(tmp_path):
    tier = place(tmp_path, "s1~1.1", "s2~1.2", "s3~2.1", tagged=["s1~1.1"])
    assert doomed(tier, 1) == ["s2~1.2"]


def test_an_abandoned_branch_stays_for_whoever_wants_it_by_name(tmp_path):
    tier = place(tmp_path, "s2~1.2", "s3~1.3", "s4~1.4", "s3~2.1", tagged=["s3~1.3"])
    assert doomed(tier, 9) == []


def test_garbage_of_older_attempts_goes_and_a_save_in_flight_does_not(tmp_path):
    tier = place(tmp_path, "s2~1.2")
    written(tier, "s9~1.9")
    written(tier, "s9~2.9")
    assert doomed(tier, 1) == ["s9~1.9"]


def test_a_damaged_one_stays_and_does_not_count_as_kept(tmp_path):
    tier = place(tmp_path, "s1~1.1", "s2~1.2", "s3~2.1")
    (tmp_path / "snapshots" / "s3~2.1" / "manifest.json").write_bytes(b"{}")
    assert doomed(tier, 1) == ["s1~1.1"]


def test_the_manifest_goes_before_its_files(tmp_path):
    disk = RecordingDisk()
    tier = LocalTier(tmp_path, disk)
    manifest = committed(tier, "s1~1.1")
    disk.done.clear()
    prune(tier, [manifest.name], ())
    assert [(kind, path.name) for kind, path in disk.done] == [
        ("remove", "manifest.json"),
        ("sync folder", "s1~1.1"),
        ("remove", "rank00000.safetensors"),
        ("rmdir", "s1~1.1"),
    ]
    prune(tier, [manifest.name], ())  # a second time is no error
    assert tier.list("snapshots") == []


@pytest.mark.parametrize("attempt", [1, 2, 3])
@given(data=st.data())
def test_whatever_the_catalog_the_newest_usable_one_is_kept(attempt, data):
    reasons = st.sampled_from(["", NOT_COMMITTED, ABANDONED, "damaged"])
    found = [
        Candidate(SnapshotName(1 + n // 3, n, n, 0), None, not reason, reason)
        for n, reason in enumerate(data.draw(st.lists(reasons, max_size=9)))
    ][::-1]
    plan = plan_prune(found, keep_last=data.draw(st.integers(0, 4)), attempt=attempt)
    usable = [c.name for c in found if c.usable]
    assert not usable or usable[0] not in plan
    assert not any(c.name in plan for c in found if c.reason == "damaged")


class KeepsOne(Disk):
    """One snapshot is another user's: nothing of it is removed."""

    def remove(self, path):
        if "s2~1.2" in path.parts:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        super().remove(path)


def test_a_snapshot_that_may_not_be_removed_keeps_no_other(tmp_path):
    place(tmp_path, "s1~1.1", "s2~1.2", "s3~2.1")
    tier = LocalTier(tmp_path, KeepsOne())
    gone = [SnapshotName.parse(text) for text in ("s2~1.2", "s1~1.1")]
    with pytest.raises(TierUnavailable, match="Operation not permitted"):
        prune(tier, gone, ())
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["s2~1.2", "s3~2.1"]
