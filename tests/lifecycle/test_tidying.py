"""What follows a commit takes as little from training as it can."""

from __future__ import annotations

from tests.lifecycle.training import attempt, usable
from trainckpt.format import manifest as manifests


def test_a_run_prunes_what_it_committed_itself_without_parsing_it(tmp_path, monkeypatch):
    loads, load = [], manifests.load
    with monkeypatch.context() as patched:
        patched.setattr(
            manifests, "load", lambda data, what: loads.append(what) or load(data, what)
        )
        attempt(tmp_path, epochs=2, every="1 steps", keep_last=2)
    assert not loads
    assert len(usable(tmp_path)) == 2
