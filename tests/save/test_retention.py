"""What follows a commit takes as little from training as it can, and believes nothing unread."""

from __future__ import annotations

from tests.end_to_end.training import attempt, usable
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests

SAVING = {"epochs": 2, "every": "1 steps", "keep_last": 2}


def test_a_run_that_prunes_parses_each_manifest_once(tmp_path, monkeypatch):
    loads, load = [], manifests.load
    with monkeypatch.context() as patched:
        patched.setattr(
            manifests,
            "load",
            lambda data, what, **more: loads.append(what) or load(data, what, **more),
        )
        attempt(tmp_path, **SAVING)
    assert loads
    assert len(loads) == len(set(loads))
    assert len(usable(tmp_path)) == 2


def test_nothing_is_pruned_for_a_manifest_that_nobody_can_read(tmp_path, monkeypatch):
    def refuse(_, what, **__):
        raise UnusableSnapshot(f"{what} cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "load", refuse)
        _, ckpt = attempt(tmp_path, **SAVING)
    assert len(usable(tmp_path)) == ckpt._attempt.saver.sequence > 2
