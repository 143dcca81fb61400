"""Power cuts: after any write, whatever was not synced may be lost, and no snapshot is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.faults.power import (
    ForgetfulDisk,
    KilledDisk,
    LateDisk,
    RecordingDisk,
    power_cuts,
    restore,
)
from tests.snapshot.written import committed, referring
from trainckpt.attempt.record_writer import AttemptId, RecordWriter
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.format.cursor import Cursor
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.replicate.uploads import Uploads
from trainckpt.save.arenas import Arenas
from trainckpt.save.committer import ManifestDefaults
from trainckpt.save.coordinator import SaveCoordinator
from trainckpt.save.estimates import Timings
from trainckpt.save.replication_control import ReplicationControl
from trainckpt.snapshot import attempt_history, prune
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.verify import verify
from trainckpt.state.destination import Destination
from trainckpt.state.registry import Registry
from trainckpt.storage import direct_io
from trainckpt.storage.local import LocalTier


@pytest.fixture(autouse=True)
def several_writers(monkeypatch):
    """A shard file of a few kilobytes is written in pieces, as a large one is."""
    monkeypatch.setattr(direct_io, "FROM_BYTES", 4096)
    monkeypatch.setattr(direct_io, "WRITE_PIECE_BYTES", 4096)


@dataclass
class Recording:
    """A run on a recording disk: its operations, and what had returned after how many."""

    root: object
    done: list
    committed: dict  # snapshot -> (operations when its save had returned, value of its weight)
    pruned: dict  # snapshot -> operations when it may begin to go
    claimed: int  # operations when the attempt had been claimed
    parent: int  # operations when its parent had been recorded


def record(place, disk, saves, keep_last=9):
    """Claim an attempt and take some saves, as a Checkpointer does."""
    place.mkdir()
    tier = LocalTier(place / "run", disk)
    run = attempt_history.found_run(tier)
    own = attempt_history.claim(tier, lambda n: AttemptRecord(n, facts={"argv": ["x"]}))
    claimed = len(disk.done)
    record_writer = RecordWriter(tier, own, writes=True)
    record_writer.change(must=True, parent=None)
    parent = len(disk.done)
    registry, weight = Registry(), nn.Linear(2, 1)
    registry.add("model", weight)
    channel = local_store(World(0, 1, 0, "here"))
    facts, arenas = (
        ManifestDefaults(run, AttemptId(1), None, {}, keep_last),
        Arenas(tier.url, 0, [0]),
    )
    saver = SaveCoordinator(
        tier=tier,
        channel=channel,
        registry=registry,
        defaults=facts,
        record_writer=record_writer,
        timings=Timings(),
        arenas=arenas,
        window_start=Cursor,
        encryption=None,
        uploads=Uploads(),
        replication=ReplicationControl(arenas, 0, None, None),
        saves_gradients=lambda: False,
        blocks_step=False,
    )
    committed, pruned = {}, {}
    for step in range(1, saves + 1):
        nn.init.constant_(weight.weight, float(step))
        before = len(disk.done)
        pending = saver.save(Cursor(step=step), "test", (), SaveHandle())
        saver.wait()
        assert pending.error is None
        commit = next(
            i
            for i, (kind, *paths) in enumerate(disk.done[before:], before + 1)
            if kind == "rename" and paths[1].name == "manifest.json"
        )
        if step > keep_last:
            pruned[f"s{step - keep_last}~1.{step - keep_last}"] = commit
        committed[pending.snapshot] = (len(disk.done), float(step))
    saver.close(keep=False)
    return Recording(place, list(disk.done), committed, pruned, claimed, parent)


def weight_in(tier, manifest):
    wanted = {"model/weight": None}
    destination = Destination(wanted)
    Reader(tier, manifest).read(wanted, destination, donor=0)
    return destination.finish({})["model/weight"]


def check(recording, number, tier):
    """What must hold if the power went after `number` operations."""
    found = attempt_history.read_attempts(tier)
    run = attempt_history.run_id(tier)
    if run is None:
        assert number < recording.claimed
        return
    if number >= recording.claimed:
        assert found[1].facts["argv"] == ["x"]
    if number >= recording.parent:
        assert found[1].parent is None
    assert all(record.parent in (UNDECIDED, None) for record in found.values())
    usable = {str(c.name): c for c in read_catalog(tier, run, found) if c.usable}
    for name, (since, value) in recording.committed.items():
        if number >= since and number < recording.pruned.get(name, 10**9):
            assert name in usable, f"{name} was durable and is gone"
        if name in usable:
            assert all(copy.ok for copy in verify(tier, usable[name].manifest))
            expected = torch.full((1, 2), value)
            assert torch.equal(weight_in(tier, usable[name].manifest), expected)


def cut_everywhere(recording, place, since=0):
    """The first broken promise after `since` operations or None, and how many states were tried."""
    tried = 0
    cuts = power_cuts(recording.done, recording.root, first=since)
    for tried, (number, state) in enumerate(cuts, 1):
        place.mkdir()
        restore(state, recording.root, place)
        try:
            check(recording, number, LocalTier(place / "run"))
        except (AssertionError, TrainckptError) as error:
            return f"after {number} operations: {error}", tried
        shutil.rmtree(place)
    return None, tried


def test_the_first_save_and_the_attempt_s_record_survive_any_cut_or_were_never_there(tmp_path):
    recording = record(tmp_path / "disk", RecordingDisk(), saves=1)
    broken, tried = cut_everywhere(recording, tmp_path / "after")
    assert broken is None
    assert tried > 100


def test_an_older_snapshot_survives_any_cut_of_the_next_save(tmp_path):
    recording = record(tmp_path / "disk", RecordingDisk(), saves=2)
    first_saved, _ = recording.committed["s1~1.1"]
    broken, tried = cut_everywhere(recording, tmp_path / "after", since=first_saved)
    assert broken is None
    assert tried > 40


def test_a_cut_while_pruning_leaves_the_newest_and_no_half_snapshot(tmp_path):
    recording = record(tmp_path / "disk", RecordingDisk(), saves=2, keep_last=1)
    [begins] = recording.pruned.values()
    broken, tried = cut_everywhere(recording, tmp_path / "after", since=begins - 1)
    assert broken is None
    assert tried > 5


WEIGHT = "model/weight"


def pruned_around(place, disk):
    """Three snapshots, the second one refers to the first, which is pruned; then the second is.

    What must be usable, and since when, until when; which weight is in it.
    """
    place.mkdir()
    tier = LocalTier(place / "run", disk)
    first = committed(tier, "s1~1.1")
    kept = {"s1~1.1": [len(disk.done), None, 1.0]}
    referring(tier, "s2~1.2", {WEIGHT: first})
    kept["s2~1.2"] = [len(disk.done), None, 1.0]
    kept["s1~1.1"][1] = len(disk.done)
    prune_as_an_attempt(tier)
    committed(tier, "s3~1.3")
    kept["s2~1.2"][1] = len(disk.done)
    kept["s3~1.3"] = [len(disk.done), None, 3.0]
    prune_as_an_attempt(tier)
    return kept


def prune_as_an_attempt(tier, attempt=1):
    candidates = read_catalog(tier, "run", {1: AttemptRecord(1, None)})
    doomed = prune.plan_prune(candidates, keep_last=1, attempt=attempt)
    files = prune.kept_files(tier, candidates, doomed)
    prune.prune(tier, [*doomed, *prune.left_folders(candidates)], files)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_cut_while_pruning_never_takes_a_file_that_another_refers_to(
    tmp_path, monkeypatch, keeps
):
    """And a prune that does not keep such files is caught by these checks."""
    if not keeps:
        monkeypatch.setattr(prune, "files_in", lambda name, kept: frozenset())
    disk, root = RecordingDisk(), tmp_path / "disk"
    expected = pruned_around(root, disk)
    lost, last = set(), set()
    for number, (done, state) in enumerate(power_cuts(disk.done, root)):
        place = tmp_path / "after"
        place.mkdir()
        restore(state, root, place)
        tier = LocalTier(place / "run")
        found = read_catalog(tier, "run", {1: AttemptRecord(1, None)}) if state else ()
        usable = {str(c.name): c.manifest for c in found if c.usable}
        for name, (since, until, weight) in expected.items():
            if done >= since and (until is None or done < until):
                lost |= {name} - set(usable)
            if name in usable:
                assert torch.equal(weight_in(tier, usable[name]), torch.full((2, 2), weight))
        lost |= {str(c.name) for c in found if c.manifest and not c.usable}
        if keeps and usable and number % 5 == 0:  # the next attempt finishes the work
            prune_as_an_attempt(tier, attempt=2)
            (left,) = read_catalog(tier, "run", {1: AttemptRecord(1, None)})
            assert all(copy.ok for copy in verify(tier, left.manifest))
            reached = {file.name.partition("/")[0] for file in left.manifest.reached}
            assert set(tier.list("snapshots")) == {str(left.name), *reached}
            last.add(str(left.name))
        shutil.rmtree(place)
    assert lost == (set() if keeps else {"s2~1.2"})
    assert last == (set(expected) if keeps else set())


@pytest.mark.parametrize("saves", [1, 2])
def test_on_a_disk_that_syncs_nothing_these_very_checks_fail(tmp_path, saves):
    recording = record(tmp_path / "disk", ForgetfulDisk(), saves=saves)
    broken, _ = cut_everywhere(recording, tmp_path / "after")
    assert broken is not None


def test_if_a_file_were_synced_before_its_last_writer_is_done_these_checks_would_fail(tmp_path):
    recording = record(tmp_path / "disk", LateDisk(), saves=1)
    broken, _ = cut_everywhere(recording, tmp_path / "after")
    assert broken is not None


def test_these_recordings_hold_several_writers_of_one_file(tmp_path):
    done = record(tmp_path / "disk", RecordingDisk(), saves=1).done
    written = [at for kind, path, *at in done if kind == "write" and path.suffix == ".safetensors"]
    assert len(written) > 3, [first_byte for first_byte, _ in written]
    assert any(kind == "reserve" for kind, *_ in done)


def test_a_folder_left_by_a_killed_process_is_made_durable_by_the_next(tmp_path):
    """The first process dies between making the folders and syncing them; no power is lost yet."""
    place = tmp_path / "disk"
    place.mkdir()
    killed = KilledDisk()
    first = LocalTier(place / "run", killed)
    attempt_history.found_run(first)
    attempt_history.claim(first, AttemptRecord)
    first.write("snapshots/s0~1.1/left-over", [memoryview(b"x")])
    next_one = RecordingDisk()
    tier = LocalTier(place / "run", next_one)
    run = attempt_history.found_run(tier)
    second = attempt_history.claim(tier, AttemptRecord)
    tier.write("snapshots/s1~2.1/rank", [memoryview(b"y")])
    done = killed.done + next_one.done
    for number, (_, state) in enumerate(power_cuts(done, place, first=len(done))):
        after = tmp_path / f"after{number}"
        after.mkdir()
        restore(state, place, after)
        survivor = LocalTier(after / "run")
        assert attempt_history.run_id(survivor) == run
        assert second.attempt in attempt_history.read_attempts(survivor)
        assert survivor.read("snapshots/s1~2.1/rank", max_bytes=9) == b"y"


def test_half_a_record_is_a_record_that_says_nothing(tmp_path):
    """Where the file system has no hard links a cut may leave one."""
    tier = LocalTier(tmp_path)
    tier.create("attempts/1.json", AttemptRecord(1).dump()[:20])
    assert attempt_history.read_attempts(tier)[1].parent == UNDECIDED
    with pytest.raises(UnusableSnapshot):
        AttemptRecord.load(b"", "x")
