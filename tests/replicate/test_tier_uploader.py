"""The ranks' flushers of one tier: what befalls a copy on one of them, all of them learn."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.snapshot.written import written
from tests.state.helpers import registry, shard_of
from trainckpt.attempt.record_writer import AttemptId, RecordWriter
from trainckpt.attempt.save_handle import COMMITTED, SaveHandle
from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.ranks.store import RankStore, local_store
from trainckpt.ranks.world import World
from trainckpt.replicate import tier_uploader
from trainckpt.replicate import tier_uploader as uploaders
from trainckpt.replicate.tier_uploader import (
    ENDS_WITHIN_S,
    HANGS_AFTER_S,
    ProgressWatchdog,
    TierUploader,
    UploadRound,
)
from trainckpt.replicate.uploads import ArenaFirstReader, UploadContext, UploadDeadline
from trainckpt.snapshot import tier_copy
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.storage.local import Disk, LocalTier

NAME = "s1~1.1"
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(uploaders, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(uploaders, "MOST_RETRY_S", 0.2)


@pytest.fixture
def place(tmp_path):
    """The run's place, where an attempt of two ranks is about to commit its first snapshot."""
    return LocalTier(tmp_path / "run")


@pytest.fixture
def manifest(place):
    """Of a snapshot of two ranks, committed in the run's place."""
    of_one = written(place, NAME)
    file = write_shard(place, of_one.name, 1, shard_of(registry(model=nn.Linear(2, 2))))
    found = replace(of_one, world=2, files=(*of_one.files, file))
    commit(place, found)
    return found


@contextmanager
def flushing(place, tiers):
    """The flushers of two ranks, each with its own object for the tier."""
    store = torch.distributed.HashStore()
    started = []
    for rank, tier in enumerate(tiers):
        tier.name = "slow"
        log = RecordWriter(place, AttemptRecord(1), writes=rank == 0)
        channel = RankStore(World(rank, 2, rank, "host"), store, "run/")
        work = UploadContext(
            place, ArenaFirstReader(place, None), channel, log, "run", AttemptId(1), 3
        )
        started.append(TierUploader(tier, work, 0, is_durable=True))
        started[-1].start()
    try:
        yield started
    finally:
        for each in reversed(started):
            each.stop()


def offered(flusher, manifest):
    """The handle of a save that this rank has seen committed."""
    pending = SaveHandle()
    pending.reach(COMMITTED, str(manifest.name))
    flusher.offer(manifest, pending, 1)
    return pending


def until(condition):
    give_up_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def durable(pending):
    """Wait, as often as it is tried anew."""
    give_up_s = time.monotonic() + WITHIN_S
    while True:
        try:
            return pending.wait("durable", WITHIN_S)
        except SaveFailed:
            assert time.monotonic() < give_up_s


def test_a_file_that_vanished_from_the_tier_is_copied_again_by_whichever_rank_wrote_it(
    place, manifest, tmp_path
):
    taken = []

    class Losing(LocalTier):
        """Somebody deletes each rank's file, once, when all of them are there."""

        def size(self, key):
            if key.endswith(".safetensors") and not taken:
                taken.extend(key for key, _ in tier_copy.files_of(manifest))
                for each in taken:
                    self.remove(each)
            return super().size(key)

    tiers = [Losing(tmp_path / "slow"), LocalTier(tmp_path / "slow")]
    with flushing(place, tiers) as (lead, follower):
        handles = [offered(follower, manifest), offered(lead, manifest)]
        for handle in handles:
            durable(handle)
    assert len(taken) == 2
    assert tier_copy.holds(tiers[0], manifest.name)
    assert lead.failed == follower.failed == 1


class Down(LocalTier):
    """Refuses every look while it is down."""

    is_down = True

    def size(self, key):
        if self.is_down:
            raise TierUnavailable("the store is down")
        return super().size(key)


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 first", "rank 0 last"])
def test_what_fails_on_rank_0_before_anybody_copies_is_told_to_who_waits_on_other_ranks(
    place, manifest, tmp_path, first
):
    tiers = [Down(tmp_path / "slow"), LocalTier(tmp_path / "slow")]
    with flushing(place, tiers) as ranks:
        handles = {}
        for rank in (first, 1 - first):
            handles[rank] = offered(ranks[rank], manifest)
            if rank == 0 and first == 0:
                until(lambda: ranks[0].failed)
        for rank in (0, 1):
            with pytest.raises(SaveFailed, match="rank 0: the store is down"):
                handles[rank].wait("durable", WITHIN_S)
        tiers[0].is_down = False
        for rank in (0, 1):
            durable(handles[rank])


def test_a_snapshot_that_is_gone_is_lost_for_good_on_all_ranks_however_late_they_wait(
    place, manifest, tmp_path
):
    place.remove(f"{manifest.name.folder}/manifest.json")
    with flushing(place, [LocalTier(tmp_path / "slow") for _ in range(2)]) as ranks:
        handles = [offered(ranks[0], manifest)]
        until(lambda: ranks[1].failed)
        handles.append(offered(ranks[1], manifest))
        for handle in 2 * handles:
            with pytest.raises(SaveFailed, match=r"manifest\.json is missing"):
                handle.wait("durable", WITHIN_S)
        assert [each.predicted_s() for each in ranks] == [0.0, 0.0]


def test_a_damaged_record_of_the_tier_is_no_loss_of_the_snapshot(place, manifest, tmp_path):
    tiers = [LocalTier(tmp_path / "slow") for _ in range(2)]
    tiers[0].create("run.json", b"{")
    with flushing(place, tiers) as ranks:
        handles = [offered(each, manifest) for each in ranks]
        for handle in handles:
            with pytest.raises(SaveFailed, match=r"run\.json"):
                handle.wait("durable", WITHIN_S)
        tiers[0].remove("run.json")
        for handle in handles:
            durable(handle)


def test_a_copy_hangs_once_no_rank_gets_on_with_it_which_the_end_of_a_file_may_hide_for_longer():
    channel = local_store(World(0, 1, 0, "host"))
    signs, copier, now_s = ProgressWatchdog(channel), UploadRound(channel), 1000.0
    assert not signs.is_stuck(now_s)
    assert not signs.is_stuck(now_s + HANGS_AFTER_S)
    assert signs.is_stuck(now_s + HANGS_AFTER_S + 1)
    copier.report_progress(8)
    now_s += HANGS_AFTER_S + 2
    assert not signs.is_stuck(now_s)
    assert not signs.is_stuck(now_s + HANGS_AFTER_S)
    assert signs.is_stuck(now_s + HANGS_AFTER_S + 1)
    with copier.copying():
        copier.report_progress(0)
        assert not signs.is_stuck(now_s)
        assert not signs.is_stuck(now_s + ENDS_WITHIN_S)
        assert signs.is_stuck(now_s + ENDS_WITHIN_S + 1)
    assert not signs.is_stuck(now_s)
    assert signs.is_stuck(now_s + HANGS_AFTER_S + 1)


class Syncing(Disk):
    """Takes its time to make a file durable."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def sync(self, path, descriptor):
        if ".tmp-copy-" in path.name:
            self.begun.set()
            assert self.may_end.wait(WITHIN_S)
        super().sync(path, descriptor)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_last_copy_whose_end_takes_long_on_some_rank_is_waited_for(
    place, manifest, tmp_path, monkeypatch, caplog, slow
):
    monkeypatch.setattr(tier_uploader, "HANGS_AFTER_S", 1.0)
    disk = Syncing()
    tiers = [LocalTier(tmp_path / "slow", disk if rank == slow else None) for rank in range(2)]
    with flushing(place, tiers) as ranks:
        for each in ranks:
            offered(each, manifest)
        assert disk.begun.wait(WITHIN_S)
        drains = [
            threading.Thread(target=each.drain, args=(UploadDeadline(WITHIN_S),)) for each in ranks
        ]
        for drain in drains:
            drain.start()
        drains[0].join(2.5)
        assert "it hangs" not in caplog.text
        monkeypatch.setattr(tier_uploader, "HANGS_AFTER_S", WITHIN_S)
        disk.may_end.set()
        for drain in drains:
            drain.join(WITHIN_S)
    assert tier_copy.holds(tiers[0], manifest.name)


def test_a_last_copy_on_which_another_rank_is_still_at_work_is_waited_for(
    place, manifest, tmp_path, monkeypatch
):
    monkeypatch.setattr(tier_uploader, "HANGS_AFTER_S", 1.5)
    monkeypatch.setattr(tier_uploader, "SIGN_S", 0.05)
    monkeypatch.setattr(tier_copy, "BLOCK_BYTES", 1 << 10)

    class Slow(Disk):
        def write(self, path, descriptor, block, first_byte):
            if ".tmp-copy-" in path.name:
                time.sleep(0.2)
            super().write(path, descriptor, block, first_byte)

    tiers = [LocalTier(tmp_path / "slow", disk) for disk in (None, Slow())]
    with flushing(place, tiers) as ranks:
        for each in ranks:
            offered(each, manifest)
        others = threading.Thread(target=ranks[1].drain, args=(UploadDeadline(WITHIN_S),))
        others.start()
        ranks[0].drain(UploadDeadline(WITHIN_S))
        others.join(WITHIN_S)
    assert tier_copy.holds(tiers[0], manifest.name)


def test_a_last_copy_that_nobody_gets_on_with_is_given_up(place, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(tier_uploader, "HANGS_AFTER_S", 0.2)
    monkeypatch.setattr(tier_uploader, "ENDS_WITHIN_S", 0.2)
    disk = Syncing()
    tiers = [LocalTier(tmp_path / "slow"), LocalTier(tmp_path / "slow", disk)]
    with flushing(place, tiers) as ranks:
        for each in ranks:
            offered(each, manifest)
        assert disk.begun.wait(WITHIN_S)
        ranks[0].drain(UploadDeadline(1e6))  # for ever, if it were not given up
        ranks[1].drain(UploadDeadline(WITHIN_S))
        assert not tier_copy.holds(tiers[0], manifest.name)
        disk.may_end.set()
