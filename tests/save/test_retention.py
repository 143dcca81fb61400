"""What follows a commit takes as little from training as it can, and believes nothing unread."""

from __future__ import annotations

import os

from torch import nn

import trainckpt
from tests.end_to_end.training import attempt, usable
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.storage.local import LocalTier

SAVING = {"epochs": 2, "every": "1 steps", "keep_last": 2}


def test_a_run_that_prunes_parses_one_of_its_own_manifests(tmp_path, monkeypatch):
    loads, load = [], manifests.load
    monkeypatch.setattr(
        manifests,
        "load",
        lambda data, what, **more: loads.append(what) or load(data, what, **more),
    )
    model = nn.Linear(2, 2)
    with trainckpt.Checkpointer(tmp_path, model=model, every="never", keep_last=2) as ckpt:
        for _ in range(4):
            handle = ckpt.save()
            ckpt.boundary()
            handle.wait("durable")
            ckpt._attempt.saver.wait_for_retention(None)
        assert len(loads) == 1
    assert len(usable(tmp_path)) == 2


def test_nothing_is_pruned_for_a_manifest_that_nobody_can_read(tmp_path, monkeypatch):
    def refuse(_, what, **__):
        raise UnusableSnapshot(f"{what} cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "load", refuse)
        _, ckpt = attempt(tmp_path, **SAVING)
    assert len(usable(tmp_path)) == ckpt._attempt.saver.sequence > 2


def test_nothing_is_pruned_for_a_manifest_that_is_damaged_on_the_disk(tmp_path, monkeypatch):
    read = LocalTier.read

    def damaged(self, key, *args, **more):
        data = read(self, key, *args, **more)
        return data.replace(b'"reason"', b'"Reason"') if key.endswith(MANIFEST) else data

    with monkeypatch.context() as patched:
        patched.setattr(LocalTier, "read", damaged)
        _, ckpt = attempt(tmp_path, **SAVING)
    assert len(usable(tmp_path)) == ckpt._attempt.saver.sequence > 2


def test_an_attempt_that_has_nothing_left_to_save_removes_what_killed_writers_left(tmp_path):
    attempt(tmp_path, **SAVING)
    temporary = [tmp_path / ".tmp-1", tmp_path / "attempts" / ".tmp-2"]
    for file in temporary:
        file.write_bytes(b"half a record")
        os.utime(file, (1e9, 1e9))
    interrupted = tmp_path / "snapshots" / "s1~1.9"
    interrupted.mkdir()
    (interrupted / "rank00000.safetensors").write_bytes(b"half a file")
    before = usable(tmp_path)
    _, again = attempt(tmp_path, **SAVING)
    assert again._attempt.saver.sequence == 0
    assert not any(left.exists() for left in (interrupted, *temporary))
    assert usable(tmp_path) == before
