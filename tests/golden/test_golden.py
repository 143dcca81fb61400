"""Snapshots of every format version ever written load, verify, and hold what they held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.make import digests_of, reading, save
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import layout, names
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.decrypting_tier import KeyRing
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.tier_copy import copy_file
from trainckpt.snapshot.verify import files_of, verify
from trainckpt.state import values
from trainckpt.storage.local import LocalTier

HERE = Path(__file__).parent
VERSIONS = sorted(HERE.glob("v*"))


def test_there_is_one_of_every_version_that_is_read():
    assert {int(folder.name[1:]) for folder in VERSIONS} == names.READABLE


@pytest.mark.parametrize("run", ["one", "two"])
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_it_verifies_and_every_rank_reads_what_was_saved(folder, run, monkeypatch):
    monkeypatch.setattr(layout, "UNCUT_BYTES", 1 << 6)  # as `make` had it, to keep them small
    tier = LocalTier(folder / run)
    (candidate,) = read_catalog(tier, "golden", {1: AttemptRecord(1, None)})
    assert candidate.usable, candidate.reason
    opener = KeyRing(str(HERE / "v4" / "identity"))
    assert all(copy.ok for copy in verify(tier, candidate.manifest, opener=opener))
    assert all(copy.ok for copy in verify(tier, candidate.manifest))
    expected = json.loads((folder / "digests.json").read_text())[run]
    for rank in range(candidate.manifest.world):
        assert digests_of(tier, candidate.manifest, rank) == expected[rank]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_a_matrix_of_the_two_rank_run_is_cut_between_the_files(folder):
    tier = LocalTier(folder / "two")
    (candidate,) = read_catalog(tier, "golden", {})
    parts = [
        place.region.key
        for rank in range(candidate.manifest.world)
        for place in Reader(*reading(tier, candidate.manifest)).places(rank)
        if not place.region.is_whole
    ]
    assert len(parts) >= 2


@pytest.mark.parametrize("version", ["v3", "v4", "v5"])
def test_from_version_3_on_half_of_it_lies_in_files_of_an_older_snapshot(version):
    tier = LocalTier(HERE / version / "two")
    (candidate,) = read_catalog(tier, "golden", {1: AttemptRecord(1, None)})
    assert len(candidate.manifest.reached) == 2
    places = list(Reader(*reading(tier, candidate.manifest)).places(1))
    older = sum(not place.key.startswith(candidate.name.folder) for place in places)
    assert older > len(places) // 3


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_a_release_before_has_written_is_referred_to_verified_and_copied(
    version, tmp_path, monkeypatch
):
    """Its manifest tells digests of whole files, the new one none of those that it reaches."""
    monkeypatch.setattr(layout, "UNCUT_BYTES", 1 << 6)
    shutil.copytree(HERE / version / "one", tmp_path / "run")
    tier, target = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slower")
    (candidate,) = read_catalog(tier, "golden", {1: AttemptRecord(1, None)})
    assert all(file.digest for file in candidate.manifest.files)
    save(tier, 1, SnapshotName(1, 2, 2, 1), 5, candidate.manifest)
    newest = read_catalog(tier, "golden", {1: AttemptRecord(1, None)})[0].manifest
    assert len(newest.reached) == 1
    assert not any(file.digest for file in (*newest.files, *newest.reached))
    assert [copy.reason for copy in verify(tier, newest)] == [""] * 2
    for key, file in files_of(newest):
        copy_file([tier], target, key, file)
    commit(target, newest)
    places = Reader(*reading(target, newest)).places(0)
    older = {p.region.tensor for p in places if not p.key.startswith(newest.name.folder)}
    then = json.loads((HERE / version / "digests.json").read_text())["one"][0]
    # Trained by this processor, whose sums may differ in the last bit.
    now = digests_of(tier, save(tier, 1, SnapshotName(1, 3, 2, 1), 5), 0)
    tensors = {n: (then if n in older else now)["tensors"][n] for n in then["tensors"]}
    assert 0 < len(older & tensors.keys()) < len(tensors)
    assert digests_of(target, newest, 0) == {**then, "tensors": tensors}
    path = tmp_path / "run" / "snapshots" / newest.reached[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    assert [copy.ok for copy in verify(tier, newest)] == [True, False]
    with pytest.raises(UnusableSnapshot, match="does not match its digest"):
        copy_file([tier], target, *list(files_of(newest))[1])


def test_its_values_decode():
    expected = json.loads((HERE / "v1" / "digests.json").read_text())
    own = values.decode(expected["one"][0]["own"], lambda node: node["$tensor"])
    assert own["numbers"][:3] == [1, 2**70, 0.1]
    assert own[3] == ("tuple", {4, 5}, frozenset({6}), b"bytes", (1, 2))


def test_the_golden_files_are_small():
    assert sum(path.stat().st_size for path in HERE.rglob("v*/**/*") if path.is_file()) < 800_000
