"""The ranks' flushers of one tier: what befalls a copy on one of them, all of them learn."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.snapshot.written import written
from tests.state.helpers import registry, shard_of
from trainckpt.errors import SaveFailed
from trainckpt.format.attempt import AttemptRecord
from trainckpt.lifecycle.flushing import flusher as flushers
from trainckpt.lifecycle.flushing.flush_work import Near, Work
from trainckpt.lifecycle.flushing.flusher import Flusher
from trainckpt.lifecycle.run.attempt_log import AttemptLog
from trainckpt.lifecycle.run.attempt_number import AttemptNumber
from trainckpt.lifecycle.run.pending import COMMITTED, PendingSave
from trainckpt.ranks.channel import OverStore
from trainckpt.ranks.world import World
from trainckpt.snapshot import flush
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.save import write_shard
from trainckpt.tiers.local import LocalTier

NAME = "s1~1.1"
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(flushers, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(flushers, "MOST_RETRY_S", 0.2)


@pytest.fixture
def place(tmp_path):
    """The run's place, where an attempt of two ranks is about to commit its first snapshot."""
    return LocalTier(tmp_path / "run")


@pytest.fixture
def manifest(place):
    """Of a snapshot of two ranks, committed in the run's place."""
    of_one = written(place, NAME)
    receipt = write_shard(place, of_one.name, 1, shard_of(registry(model=nn.Linear(2, 2))))
    found = replace(of_one, world=2, files=(*of_one.files, receipt.file))
    commit(place, found)
    return found


@contextmanager
def flushing(place, tiers):
    """The flushers of two ranks, each with its own object for the tier."""
    store = torch.distributed.HashStore()
    started = []
    for rank, tier in enumerate(tiers):
        tier.name = "slow"
        log = AttemptLog(place, AttemptRecord(1), writes=rank == 0)
        channel = OverStore(World(rank, 2, rank, "host"), store, "run/")
        work = Work(place, Near(place, None), channel, log, "run", AttemptNumber(1), 3)
        started.append(Flusher(tier, work, 0, is_durable=True))
        started[-1].start()
    try:
        yield started
    finally:
        for each in reversed(started):
            each.stop()


def offered(flusher, manifest):
    """The handle of a save that this rank has seen committed."""
    pending = PendingSave()
    pending.reach(COMMITTED, str(manifest.name))
    flusher.offer(manifest, pending, 1)
    return pending


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
                taken.extend(key for key, _ in flush.files_of(manifest))
                for each in taken:
                    self.remove(each)
            return super().size(key)

    tiers = [Losing(tmp_path / "slow"), LocalTier(tmp_path / "slow")]
    with flushing(place, tiers) as (lead, follower):
        handles = [offered(follower, manifest), offered(lead, manifest)]
        for handle in handles:
            durable(handle)
    assert len(taken) == 2
    assert flush.holds(tiers[0], manifest.name)
    assert lead.failed == follower.failed == 1
