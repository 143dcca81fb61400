"""Saves that stay in this host's memory, and what the next attempt makes of them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from tests.end_to_end.test_memory_tier import flip
from tests.end_to_end.training import attempt, crashed, usable
from trainckpt import Checkpointer
from trainckpt.errors import TierUnavailable
from trainckpt.launcher.prefetch import bring
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.replicate.replicator import domains_of
from trainckpt.resume.scavenge import scavenge
from trainckpt.run_directory.validate import RankLocation, own_view
from trainckpt.snapshot.attempt_history import run_id
from trainckpt.storage import replica_slots
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import ROOT_VARIABLE, SharedMemoryDir

CRASH_AT = 9  # after four steps
SAVING = {"epochs": 3, "every": "3 steps", "memory_every": "1 step"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


def shard_file(place):
    """Of the newest snapshot in memory whose manifest is there."""
    memory = SharedMemoryDir.found(str(place))
    (folder,) = [
        f for f in memory.folders() if replica_slots.MANIFEST in replica_slots.files(memory, f)
    ]
    return memory.root / folder / "rank00000.safetensors"


def test_a_crashed_run_goes_on_from_the_step_it_had_in_memory(tmp_path, straight, caplog):
    crashed(tmp_path, CRASH_AT, **SAVING)
    assert usable(tmp_path) == ["s3~1.3"]
    assert bring(LocalTier(tmp_path), SharedMemoryDir.found(str(tmp_path))) == []
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, ckpt = attempt(tmp_path, **SAVING)
    assert "rescued s4~1.4 from memory to" in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == "s4~1.4"
    assert "s4~1.4 was read from memory" in caplog.text
    assert parts.state() == straight
    assert SharedMemoryDir.found(str(tmp_path)) is None  # finished: given back


def test_two_processes_never_bring_the_same_memory(tmp_path):
    """The other may commit a file that this one is about to write anew."""
    crashed(tmp_path, CRASH_AT, **SAVING)
    tier, channel = LocalTier(tmp_path), local_store(World(0, 1, 0, "host"))
    run, seats = run_id(tier), [RankLocation("host", own_view())]
    code = (
        "import sys; from trainckpt.storage.shared_memory import SharedMemoryDir\n"
        "with SharedMemoryDir.of(sys.argv[1]).fetching():\n    print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(TierUnavailable, match="two must not write"):
            scavenge(tier, channel.scoped("first"), run, seats, alone_within_s=0.1)
        assert usable(tmp_path) == ["s3~1.3"]
    assert str(scavenge(tier, channel, run, seats)) == "s4~1.4"  # the other has ended


def test_memory_is_brought_where_the_system_gives_no_lock_and_nobody_tries_for_ever(
    tmp_path, monkeypatch
):
    crashed(tmp_path, CRASH_AT, **SAVING)
    tier, channel, opened, asked = (
        LocalTier(tmp_path),
        local_store(World(0, 1, 0, "host")),
        os.open,
        [],
    )

    def refused(path, *arguments, **how):
        if str(path).endswith("/fetching"):
            asked.append(path)
            assert len(asked) < 10
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **how)

    monkeypatch.setattr(os, "open", refused)
    name = scavenge(
        tier, channel, run_id(tier), [RankLocation("host", own_view())], alone_within_s=30.0
    )
    assert str(name) == "s4~1.4"
    assert asked


@pytest.mark.parametrize("spoil", ["file", "manifest", "gone"])
def test_what_is_not_good_in_memory_is_passed_over_with_the_reason(
    tmp_path, straight, caplog, spoil
):
    crashed(tmp_path, CRASH_AT, **SAVING)
    file = shard_file(tmp_path)
    if spoil == "gone":
        file.unlink()
    else:
        flip(file if spoil == "file" else file.with_name(replica_slots.MANIFEST), 100)
    parts, ckpt = attempt(tmp_path, **SAVING)
    assert "s4~1.4 in memory is no longer complete" in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == "s3~1.3"
    assert parts.state() == straight


def test_memory_that_is_older_than_the_newest_commit_is_left(tmp_path, straight, caplog):
    crashed(tmp_path, CRASH_AT - 2, **SAVING)  # the commit of step 3 is the newest
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, ckpt = attempt(tmp_path, **SAVING)
    assert "in memory alone" not in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == "s3~1.3"
    assert parts.state() == straight


def test_without_shared_memory_for_two_files_nothing_is_kept_and_that_is_said(
    tmp_path, straight, caplog, monkeypatch
):
    monkeypatch.setenv(ROOT_VARIABLE, "none")
    parts, _ = attempt(tmp_path, **SAVING)
    assert (
        "s1~1.1 was not replicated to other hosts: rank 0 has too little shared memory"
        in caplog.text
    )
    assert parts.state() == straight


def test_ranks_of_one_host_are_in_one_domain_whatever_they_say():
    assert domains_of(["a", "a", "b", "c"], ["r1", "r2", "r1", ""]) == ["r1", "r1", "r1", "host c"]


def test_with_saves_at_every_step_no_step_is_taken_before_the_one_before_is_kept(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer, order = torch.optim.SGD(model.parameters(), 0.1), []
    optimizer.register_step_post_hook(lambda *_: order.append("step"))
    saving = {"every": "never", "memory_every": "1 step"}
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, **saving) as ckpt:
        protecting = ckpt._attempt.saver.replication
        keep = protecting.keep_in_memory

        def slow(*arguments):
            time.sleep(0.1)  # longer than such a step by far
            keep(*arguments)
            order.append("kept")

        protecting.keep_in_memory = slow
        for _ in range(4):
            ckpt.boundary()
            model(torch.ones(4)).sum().backward()
            optimizer.step()
    assert order[:7] == ["step", "kept", "step", "kept", "step", "kept", "step"]
