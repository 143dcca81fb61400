"""A copy never costs a good one: what stands in a tier stays until a better one takes its place."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest

from tests.snapshot.written import committed, referring, shard_path
from trainckpt.errors import SaveFailed, TierUnavailable, UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.cursor import Cursor
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.snapshot import catalog, tier_copy
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.verify import verify
from trainckpt.storage import multipart_upload
from trainckpt.storage.local import Disk, LocalTier
from trainckpt.storage.object_client import ObjectClient
from trainckpt.storage.object_store import ObjectStoreTier, open_object_store
from trainckpt.storage.retry import Limits, RetryPolicy

NAME = "s1~1.1"


@pytest.fixture(params=["a directory", "a store"])
def tiers(request, tmp_path):
    """The run's place, and a slower tier."""
    place = LocalTier(tmp_path / "run")
    target = LocalTier(tmp_path / "slow")
    if request.param == "a store":
        target = open_object_store(f"memory://{tmp_path.name}/slow")
    target.name = "slow"
    return place, target


class Meanwhile:
    """A source that lets something else happen once a block of it is wanted."""

    def __init__(self, tier, act):
        self.tier, self.act, self.name, self.url = tier, act, tier.name, tier.url

    def read_into(self, key, first_byte, into):
        self.act()
        self.tier.read_into(key, first_byte, into)


def to_copy(place, target):
    """A snapshot, its manifest's bytes, and its file; the slower tier holds the run."""
    manifest = committed(place, NAME)
    tier_copy.found_there(place, target, manifest.run)
    data = place.read(f"{manifest.name.folder}/{MANIFEST}", max_bytes=1 << 20)
    return manifest, data, *next(iter(tier_copy.files_of(manifest)))


def copied_by_another(place, target, manifest, data):
    for key, file in tier_copy.files_of(manifest):
        tier_copy.copy_missing([place], target, manifest, key=key, file=file)
    tier_copy.commit_copy(target, manifest, data)


def is_good(tier, manifest):
    (candidate,) = catalog.read_catalog(tier, manifest.run, {})
    return candidate.usable and all(copy.ok for copy in verify(tier, manifest))


def spoil(tier, key):
    data = bytearray(tier.read(key, max_bytes=1 << 20))
    data[-1] ^= 1
    tier.replace(key, bytes(data))
    return bytes(data)


@pytest.mark.parametrize("of_an_older_file", [False, True], ids=["a new file", "an older file"])
def test_who_is_interrupted_leaves_what_another_has_finished_meanwhile(tiers, of_an_older_file):
    place, target = tiers
    manifest, data, key, file = to_copy(place, target)
    if of_an_older_file:  # cut short, by one that was killed
        target.write(key, [memoryview(b"x")])

    def interrupted():
        copied_by_another(place, target, manifest, data)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier_copy.copy_file([Meanwhile(place, interrupted)], target, key, file)
    assert is_good(target, manifest)


def test_who_fails_because_another_was_done_and_the_place_pruned_is_done_too(tiers):
    place, target = tiers
    manifest, data, key, file = to_copy(place, target)

    def pruned():
        copied_by_another(place, target, manifest, data)
        shutil.rmtree(place.root / manifest.name.folder)

    source = Meanwhile(place, pruned)
    assert not tier_copy.copy_missing([source], target, manifest, key=key, file=file)
    assert is_good(target, manifest)


def test_what_another_has_committed_is_not_copied_again(tiers):
    place, target = tiers
    manifest, data, key, file = to_copy(place, target)
    assert tier_copy.copy_missing([place], target, manifest, key=key, file=file)
    copied_by_another(place, target, manifest, data)
    assert not tier_copy.copy_missing([], target, manifest, key=key, file=file)
    target.replace(key, b"short")
    assert tier_copy.copy_missing([place], target, manifest, key=key, file=file)
    assert is_good(target, manifest)


def test_a_bad_file_stays_until_a_good_one_can_take_its_place(tiers):
    place, target = tiers
    manifest, data, key, file = to_copy(place, target)
    copied_by_another(place, target, manifest, data)
    bad = spoil(target, key)
    good = shard_path(place, NAME).read_bytes()
    spoil(place, key)
    with pytest.raises(UnusableSnapshot, match="does not match its digest"):
        tier_copy.copy_file([place], target, key, file)
    assert target.read(key, max_bytes=1 << 20) == bad

    def gone():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier_copy.copy_file([Meanwhile(place, gone)], target, key, file)
    assert target.read(key, max_bytes=1 << 20) == bad
    shard_path(place, NAME).write_bytes(good)
    tier_copy.copy_file([place], target, key, file)
    assert is_good(target, manifest)


def test_what_a_killed_copier_has_left_is_no_file_and_goes_with_the_commit(tmp_path):
    place, target = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slow")
    manifest, data, *_ = to_copy(place, target)
    folder = target.root / manifest.name.folder
    folder.mkdir(parents=True)
    (folder / ".tmp-copy-1").write_bytes(b"half of it")
    (folder / ".tmp-1").write_bytes(b"a manifest that somebody is creating")
    assert target.list(manifest.name.folder) == []
    copied_by_another(place, target, manifest, data)
    there = {path.name for path in folder.iterdir()}
    assert there == {".tmp-1", MANIFEST, "rank00000.safetensors"}
    assert is_good(target, manifest)


class FewParts(ObjectClient):
    """A store that takes so many parts of an object, and no more."""

    def begin(self, path, part_bytes):
        upload = super().begin(path, part_bytes)
        send = upload.part

        def part(number, data):
            if number > multipart_upload.MOST_PARTS:
                raise ValueError("Part number must be an integer between 1 and 10000, inclusive")
            send(number, data)

        upload.part = part
        return upload


@pytest.mark.parametrize("of_bytes", [300_000, 6_000_000])
def test_a_copy_has_no_more_parts_than_a_store_takes(tmp_path, monkeypatch, of_bytes):
    monkeypatch.setattr(multipart_upload, "MOST_PARTS", 4)
    data = bytes(range(250)) * (of_bytes // 250)
    file = SimpleNamespace(num_bytes=len(data), digest=digest.digest(data))
    place, url = LocalTier(tmp_path), f"memory://{tmp_path.name}"
    place.replace("k", data)
    calls = RetryPolicy(url, Limits(part_bytes=64 << 10, give_up_first_s=0.0, give_up_s=0.0))
    client = FewParts(fsspec.filesystem("memory"))
    store = ObjectStoreTier("memory", url, client, f"/{tmp_path.name}", calls)
    tier_copy.copy_file([place], store, "k", file)
    assert store.read("k", max_bytes=len(data)) == data


def test_a_copy_that_a_full_disk_has_no_room_for_is_refused_before_a_byte_is_read(tmp_path):
    class Full(Disk):
        def reserve(self, path, descriptor, num_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read():
        pytest.fail("it was read")

    place, target = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slow", Full())
    manifest = committed(place, NAME)
    key, file = next(iter(tier_copy.files_of(manifest)))
    with pytest.raises(TierUnavailable, match="No space left"):
        tier_copy.copy_file([Meanwhile(place, read)], target, key, file)
    assert not list((target.root / manifest.name.folder).iterdir())


def of_another_history(tier, text):
    """A snapshot of this name and length with other weights: another disk's, of the same run."""
    manifest = committed(tier, text.replace("s1", "s7"))
    other = replace(manifest, name=SnapshotName.parse(text), cursor=Cursor(step=1, micro=0))
    tier.root.joinpath("snapshots", str(manifest.name)).rename(tier.root / other.name.folder)
    tier.remove(f"{other.name.folder}/{MANIFEST}")
    commit(tier, other)
    return other


def all_of(tier):
    return {path: path.read_bytes() for path in tier.root.rglob("*") if path.is_file()}


def test_a_snapshot_is_not_copied_over_another_of_its_name(tmp_path):
    place, target = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slow")
    manifest, _, key, file = to_copy(place, target)
    of_another_history(target, NAME)
    before = all_of(target)
    with pytest.raises(
        SaveFailed, match=rf"cannot copy {NAME}: .* holds another snapshot of this name"
    ):
        tier_copy.copy_missing([place], target, manifest, key=key, file=file)
    with pytest.raises(
        SaveFailed, match=rf"cannot copy {NAME}: .* holds another snapshot of this name"
    ):
        tier_copy.must_not_be_another(target, manifest)
    assert all_of(target) == before
    target.replace(f"{manifest.name.folder}/{MANIFEST}", b"cut sho")  # then it is none
    assert tier_copy.copy_missing([place], target, manifest, key=key, file=file)
    tier_copy.must_not_be_another(target, manifest)


def test_a_snapshot_is_not_copied_to_where_another_is_called_as_one_it_refers_to(tmp_path):
    place, target = LocalTier(tmp_path / "run"), LocalTier(tmp_path / "slow")
    older, *_ = to_copy(place, target)
    newer = referring(place, "s2~1.2", {"model/weight": older})
    tier_copy.must_not_be_another(target, newer)
    data = place.read(f"{older.name.folder}/{MANIFEST}", max_bytes=1 << 20)
    copied_by_another(place, target, older, data)
    tier_copy.must_not_be_another(target, newer)
    shutil.rmtree(target.root / older.name.folder)
    of_another_history(target, NAME)
    with pytest.raises(
        SaveFailed, match=rf"cannot copy {NAME}: .* holds another snapshot of this name"
    ):
        tier_copy.must_not_be_another(target, newer)
