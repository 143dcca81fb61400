"""Snapshots that refer to files of older ones: read, checked, refused, and pruned around."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.faults.test_bad_bytes import flip
from tests.snapshot.written import committed, referring, shard_path, written
from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.digest import digest
from trainckpt.snapshot import prune
from trainckpt.snapshot import prune as prune_module
from trainckpt.snapshot.catalog import NOT_COMMITTED, load_manifest, read_catalog
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.verify import verify
from trainckpt.state.destination import Destination
from trainckpt.storage.local import LocalTier

RECORDS = {1: AttemptRecord(1, None)}
WEIGHT, BIAS = "model/weight", "model/bias"


def tensor(tier, manifest, name):
    """One tensor, read through the manifest's bytes."""
    manifest = load_manifest(tier, "run", manifest.name)
    destination = Destination({name: None})
    Reader(tier, manifest).read({name: None}, destination, donor=0)
    return destination.finish({})[name]


def listed(tier):
    return {str(c.name): c.reason for c in read_catalog(tier, "run", RECORDS)}


def pruned(tier, keep_last, attempt=1):
    """As the newest attempt does it."""
    candidates = read_catalog(tier, "run", RECORDS)
    doomed = prune.plan_prune(candidates, keep_last=keep_last, attempt=attempt)
    kept = prune.kept_files(tier, candidates, doomed)
    prune.prune(tier, [*doomed, *prune.left_folders(candidates)], kept)
    return sorted(map(str, doomed))


def there(tier):
    """Snapshot folder -> names in it."""
    return {folder: tier.list(f"snapshots/{folder}") for folder in tier.list("snapshots")}


def test_a_region_is_read_from_the_older_file_and_verified_there(tmp_path):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    second = referring(tier, "s2~1.2", {WEIGHT: first})
    assert torch.equal(tensor(tier, second, WEIGHT), torch.full((2, 2), 1.0))
    assert all(copy.ok for copy in verify(tier, second))
    data = shard_path(tier, "s1~1.1").read_bytes()
    flip(shard_path(tier, "s1~1.1"), data.index(torch.full((2, 2), 1.0).numpy().tobytes()))
    with pytest.raises(UnusableSnapshot, match=r"s1~1\.1/rank00000.*model/weight does not match"):
        tensor(tier, second, WEIGHT)
    bad = [copy for copy in verify(tier, second) if not copy.ok]
    assert [(copy.snapshot, copy.file) for copy in bad] == [
        ("s2~1.2", "s1~1.1/rank00000.safetensors")
    ]


def test_a_header_that_was_changed_is_refused_before_it_is_believed(tmp_path):
    tier = LocalTier(tmp_path)
    second = referring(tier, "s2~1.2", {WEIGHT: committed(tier, "s1~1.1")})
    flip(shard_path(tier, "s1~1.1"), 30)
    with pytest.raises(UnusableSnapshot, match=r"header of snapshots/s1~1\.1/rank00000"):
        tensor(tier, second, WEIGHT)


def test_a_file_that_several_snapshots_refer_to_is_checked_once(tmp_path):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    later = [referring(tier, f"s{n}~1.{n}", {WEIGHT: first}) for n in (2, 3)]
    read, known = [], {}
    for manifest in (*later, first):
        assert all(copy.ok for copy in verify(tier, manifest, read.append, known))
    assert sum(read) == sum(manifest.num_bytes for manifest in (first, *later))


def test_a_reference_to_a_reference_is_none(tmp_path):
    """What is reached holds the bytes itself: nobody follows a chain."""
    tier = LocalTier(tmp_path)
    second = referring(tier, "s2~1.2", {WEIGHT: committed(tier, "s1~1.1")})
    third = referring(tier, "s3~1.3", {WEIGHT: second})
    with pytest.raises(UnusableSnapshot, match=r"model/weight, which is not in s2~1\.2"):
        tensor(tier, third, WEIGHT)
    assert "which is not in" in verify(tier, third)[-1].reason


def test_a_file_that_the_manifest_does_not_name_is_not_opened(tmp_path):
    tier = LocalTier(tmp_path)
    second = referring(tier, "s2~1.2", {WEIGHT: committed(tier, "s1~1.1")}, reached=())
    with pytest.raises(UnusableSnapshot, match=r"s1~1\.1/rank00000.*which is not in the manifest"):
        tensor(tier, second, BIAS)


def test_a_snapshot_whose_older_file_is_missing_or_short_is_refused_with_that_reason(tmp_path):
    tier = LocalTier(tmp_path)
    referring(tier, "s2~1.2", {WEIGHT: committed(tier, "s1~1.1")})
    with shard_path(tier, "s1~1.1").open("r+b") as file:
        file.truncate(100)
    assert listed(tier)["s2~1.2"].startswith("s1~1.1/rank00000.safetensors has 100 bytes, not ")
    shard_path(tier, "s1~1.1").unlink()
    assert listed(tier)["s2~1.2"] == "s1~1.1/rank00000.safetensors is missing"


def test_nothing_is_committed_that_refers_to_a_file_that_is_gone(tmp_path):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    shard_path(tier, "s1~1.1").unlink()
    with pytest.raises(SaveFailed, match=r"s1~1\.1/rank00000\.safetensors has None bytes"):
        referring(tier, "s2~1.2", {WEIGHT: first})


def test_prune_keeps_the_file_as_long_as_a_snapshot_refers_to_it_and_no_longer(tmp_path):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    second = referring(tier, "s2~1.2", {WEIGHT: first})
    assert pruned(tier, 1) == ["s1~1.1"]
    assert there(tier)["s1~1.1"] == ["rank00000.safetensors"]
    assert listed(tier) == {"s2~1.2": ""}  # what was pruned is no snapshot any more
    assert torch.equal(tensor(tier, second, WEIGHT), torch.full((2, 2), 1.0))
    third = referring(tier, "s3~1.3", {WEIGHT: first})
    assert pruned(tier, 1) == ["s2~1.2"]
    assert set(there(tier)) == {"s1~1.1", "s3~1.3"}
    assert all(copy.ok for copy in verify(tier, third))
    committed(tier, "s4~1.4")
    assert pruned(tier, 1) == ["s3~1.3"]
    assert set(there(tier)) == {"s4~1.4"}


def test_of_several_files_only_those_stay_that_are_referred_to(tmp_path):
    tier = LocalTier(tmp_path)
    first, second = committed(tier, "s1~1.1"), committed(tier, "s2~1.2")
    shard_path(tier, "s1~1.1", rank=1).write_bytes(b"of another rank")
    referring(tier, "s3~1.3", {WEIGHT: first, BIAS: second})
    pruned(tier, 1)
    assert there(tier)["s1~1.1"] == there(tier)["s2~1.2"] == ["rank00000.safetensors"]


@pytest.mark.parametrize("keeper", ["tagged", "abandoned", "damaged", "not yet committed"])
def test_whatever_stays_keeps_what_it_refers_to(tmp_path, keeper):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    manifest = referring(tier, "s2~1.2", {WEIGHT: first}, tags=("best",) * (keeper == "tagged"))
    path = shard_path(tier, "s2~1.2").with_name("manifest.json")
    records = {1: AttemptRecord(1, None), 2: AttemptRecord(2, "s1~1.1")}
    if keeper == "damaged":
        flip(path, 50)
    if keeper == "not yet committed":
        path.rename(path.with_name("s3~2.9"))
        path.parent.rename(path.parent.with_name("s3~2.9"))
    committed(tier, "s3~2.1" if keeper != "tagged" else "s3~1.3")
    candidates = read_catalog(tier, "run", records if keeper != "tagged" else RECORDS)
    doomed = prune.plan_prune(candidates, keep_last=1, attempt=2)
    assert [str(name) for name in doomed] == ["s1~1.1"]
    prune.prune(tier, doomed, prune.kept_files(tier, candidates, doomed))
    assert there(tier)["s1~1.1"] == ["rank00000.safetensors"]
    if keeper in ("tagged", "abandoned"):
        assert torch.equal(tensor(tier, manifest, WEIGHT), torch.full((2, 2), 1.0))


def test_what_a_cut_short_prune_left_goes_the_next_time_also_in_the_same_attempt(tmp_path):
    tier = LocalTier(tmp_path)
    for n in (1, 2):
        committed(tier, f"s{n}~1.{n}")
    (tmp_path / "snapshots" / "s1~1.1" / "manifest.json").unlink()
    written(tier, "s3~1.3")  # in flight
    assert listed(tier) == {"s1~1.1": NOT_COMMITTED, "s2~1.2": "", "s3~1.3": NOT_COMMITTED}
    assert pruned(tier, 1) == ["s1~1.1"]
    assert set(there(tier)) == {"s2~1.2", "s3~1.3"}


def test_a_sweep_touches_no_save_in_flight_and_no_file_that_is_referred_to(tmp_path):
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    referring(tier, "s2~1.2", {WEIGHT: first})
    written(tier, "s3~1.3")
    pruned(tier, 1)
    candidates = read_catalog(tier, "run", RECORDS)
    assert prune_module.plan_sweep(candidates, keep_last=1, live={1}) == ()
    assert [str(name) for name in prune.left_folders(candidates)] == ["s1~1.1"]
    assert prune.kept_files(tier, candidates, ()) == {"s1~1.1/rank00000.safetensors"}


def test_what_it_refers_to_is_bound_by_digests(tmp_path):
    """Another file of that name and length, even a good one, is not taken for it."""
    tier = LocalTier(tmp_path)
    first = committed(tier, "s1~1.1")
    other = replace(
        first.files[0],
        header_digest=digest(b"another"),
        digest=digest(b"another"),
        name="s1~1.1/rank00000.safetensors",
    )
    second = referring(tier, "s2~1.2", {WEIGHT: first}, reached=(other,))
    with pytest.raises(UnusableSnapshot, match="does not match its digest"):
        tensor(tier, second, WEIGHT)
    assert not verify(tier, second)[1].ok
