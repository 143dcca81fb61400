"""What follows a commit takes as little from training as it can, and believes nothing unread."""

from __future__ import annotations

from tests.end_to_end.training import attempt, usable
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.storage.local import LocalTier

SAVING = {"epochs": 2, "every": "1 steps", "keep_last": 2}


def test_a_run_that_prunes_parses_none_of_its_own_manifests(tmp_path, monkeypatch):
    loads, load = [], manifests.load
    with monkeypatch.context() as patched:
        patched.setattr(
            manifests,
            "load",
            lambda data, what, **more: loads.append(what) or load(data, what, **more),
        )
        attempt(tmp_path, **SAVING)
        assert not loads
        attempt(tmp_path, **{**SAVING, "epochs": 3})
    assert loads
    assert len(usable(tmp_path)) == 2


def test_nothing_is_pruned_for_a_manifest_that_is_damaged_on_the_disk(tmp_path, monkeypatch):
    read = LocalTier.read

    def damaged(self, key, *args, **more):
        data = read(self, key, *args, **more)
        return data.replace(b'"reason"', b'"Reason"') if key.endswith(MANIFEST) else data

    with monkeypatch.context() as patched:
        patched.setattr(LocalTier, "read", damaged)
        _, ckpt = attempt(tmp_path, **SAVING)
    assert len(usable(tmp_path)) == ckpt._attempt.saver.sequence > 2
