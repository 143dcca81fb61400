"""Which snapshots a resume may use: ancestry, abandoned branches, refusals with reasons."""

from __future__ import annotations

import pytest

from tests.snapshot.written import committed, shard_path, written
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.catalog import (
    ABANDONED,
    NOT_COMMITTED,
    ancestry,
    find,
    read_catalog,
    read_newest,
)
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import open_object_store

INF = float("inf")


def records(*parents):
    """Attempts 1, 2, ... that began from these snapshots."""
    return {n: AttemptRecord(n, parent) for n, parent in enumerate(parents, 1)}


def names(*texts):
    return [SnapshotName.parse(text) for text in texts]


@pytest.mark.parametrize(
    ("parents", "found", "reach"),
    [
        ([], [], {}),
        ([None], ["s1~1.1"], {1: INF}),
        ([None, "s2~1.2"], ["s1~1.1", "s2~1.2"], {2: INF, 1: 2}),
        # a zombie: attempt 1 went on after 2 had begun from its second save
        ([None, "s2~1.2"], ["s2~1.2", "s3~1.3"], {2: INF, 1: 2}),
        # resume --at an old one leaves a branch behind: 2 is on nobody's way
        ([None, "s2~1.2", "s1~1.1"], ["s9~2.5"], {3: INF, 1: 1}),
        # 2 died before it chose, or is choosing now: whatever its predecessor has
        ([None, UNDECIDED], ["s1~1.1"], {2: INF, 1: INF}),
        ([None, UNDECIDED, UNDECIDED], [], {3: INF, 2: INF, 1: INF}),
        # a new start: nothing before counts
        ([None, None], ["s5~1.5"], {2: INF}),
        # records lost: the snapshots still say which attempts there were
        ([], ["s1~1.1", "s2~3.1"], {3: INF, 1: INF}),
        # a record that cannot be: its own successor, or no name
        (["s1~2.1"], [], {1: INF}),
        (["s1~1.1"], [], {1: INF}),
        (["what"], [], {1: INF}),
    ],
)
def test_the_ancestry_of_the_newest_attempt(parents, found, reach):
    assert ancestry(records(*parents), names(*found)) == reach


def test_a_zombie_s_commits_are_an_abandoned_branch_and_used_only_by_name(tmp_path):
    tier = LocalTier(tmp_path)
    for text in ("s1~1.1", "s2~1.2", "s3~1.3", "s3~2.1"):
        committed(tier, text)
    found = read_catalog(tier, "run", records(None, "s2~1.2"))
    assert [(str(c.name), c.usable) for c in found] == [
        ("s3~2.1", True),
        ("s3~1.3", False),
        ("s2~1.2", True),
        ("s1~1.1", True),
    ]
    assert found[1].reason == ABANDONED
    assert str(find(found, "s3~1.3").name) == "s3~1.3"
    assert str(find(found, "s3").name) == "s3~2.1"
    assert str(find(found, "latest").name) == "s3~2.1"


def test_a_tag_names_the_newest_that_has_it(tmp_path):
    tier = LocalTier(tmp_path)
    for text, tags in (("s1~1.1", ("best",)), ("s2~1.2", ("best",)), ("s3~1.3", ())):
        committed(tier, text, tags)
    found = read_catalog(tier, "run", records(None))
    assert str(find(found, "best").name) == "s2~1.2"
    with pytest.raises(UnusableSnapshot, match=r"no snapshot 'worst'; newest: s3~1\.3, s2~1\.2"):
        find(found, "worst")


def test_what_was_cut_short_is_listed_as_that(tmp_path):
    tier = LocalTier(tmp_path)
    written(tier, "s1~1.1")
    (candidate,) = read_catalog(tier, "run", records(None))
    assert (candidate.usable, candidate.reason) == (False, NOT_COMMITTED)


def test_files_that_are_missing_or_short_are_named_without_reading_them(tmp_path):
    tier = LocalTier(tmp_path)
    for text in ("s1~1.1", "s2~1.2"):
        committed(tier, text)
    shard_path(tier, "s1~1.1").unlink()
    with shard_path(tier, "s2~1.2").open("r+b") as file:
        file.truncate(100)
    short, missing = read_catalog(tier, "run", records(None))
    assert missing.reason == "rank00000.safetensors is missing"
    assert short.reason.startswith("rank00000.safetensors has 100 bytes, not ")


def test_a_manifest_of_another_run_or_of_another_snapshot_is_refused(tmp_path):
    tier = LocalTier(tmp_path)
    committed(tier, "s1~1.1")
    committed(tier, "s2~1.2")
    (foreign, *_) = read_catalog(tier, "another", records(None))
    assert "belongs to another run" in foreign.reason
    one, two = (tmp_path / "snapshots" / n / "manifest.json" for n in ("s1~1.1", "s2~1.2"))
    two.write_bytes(one.read_bytes())
    swapped, _ = read_catalog(tier, "run", records(None))
    assert swapped.reason.endswith("is the manifest of s1~1.1")


def test_the_newest_usable_one_is_found_without_a_look_at_older_ones(tmp_path):
    tier = LocalTier(tmp_path)
    for number in range(1, 6):
        committed(tier, f"s{number}~1.{number}")
    written(tier, "s6~1.6")
    shard_path(tier, "s5~1.5").write_bytes(b"short")
    found = read_newest(tier, "run", records(None))
    assert found == read_catalog(tier, "run", records(None))[:3]
    assert [c.usable for c in found] == [False, False, True]
    shard_path(tier, "s4~1.4").unlink()
    assert [str(c.name) for c in read_newest(tier, "run", records(None)) if c.usable] == ["s3~1.3"]


def test_the_catalog_of_a_store_is_that_of_a_directory(tmp_path, monkeypatch):
    """A store is asked from several threads."""
    tier = LocalTier(tmp_path, name="memory")
    for number in range(1, 21):
        committed(tier, f"s{number}~1.{number}")
    written(tier, "s21~1.21")
    shard_path(tier, "s9~1.9").write_bytes(b"short")
    store, refused = open_object_store(f"memory://bucket/{tmp_path.name}"), []
    for path in tmp_path.rglob("*"):
        if path.is_file():
            store.replace(str(path.relative_to(tmp_path)), path.read_bytes())
    assert read_catalog(store, "run", records(None)) == read_catalog(tier, "run", records(None))

    def refuse(key, *, max_bytes):
        refused.append(key)
        raise TierUnavailable("it does not answer")

    monkeypatch.setattr(store, "read", refuse)
    with pytest.raises(TierUnavailable, match="does not answer"):
        read_catalog(store, "run", records(None))
    assert len(refused) < 20  # no further one is asked for after an error
