"""Whole proofs of the script: what they say, what they keep, what they leave alone."""

from __future__ import annotations

import pytest

from tests.sensitivity.runs import SCRIPT, warm
from trainckpt.prove.proof import Proof, prove


@pytest.fixture
def proof(server, tmp_path, monkeypatch):
    """Prove the script with some flags; its own run lies beside, its temporary files in `tmp`."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("the user's own")

    def run_it(*flags: str, stops: int = 1, keep: str | None = None) -> Proof:
        command = [str(SCRIPT), "--workers", "0", "--run", str(run), *flags]
        found = prove(
            command, stops=stops, nproc=None, keep=keep, say=said.append, launch=warm(server)
        )
        assert [path.name for path in run.iterdir()] == ["run.json"]
        assert (run / "run.json").read_text() == "the user's own"
        return found

    said: list[str] = []
    run_it.said = said
    return run_it


def test_an_exact_script_is_said_to_be_and_nothing_is_left(proof, tmp_path):
    """Stopped in order, then killed; the script's own run is not touched."""
    found = proof(stops=2)
    assert found.exact, found.verdict()
    assert [stop.signal for stop in found.stops] == ["SIGTERM", "SIGKILL"]
    assert found.verdict() == (
        f"exact: 24 micro-batches on 1 ranks, resumed from step {found.stops[0].step} micro-batch "
        f"{found.stops[0].micro}, bitwise identical"
    )
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_broken_resume_is_not_exact_and_its_logs_are_kept(proof, tmp_path):
    """The part to look at, and the folder to look into."""
    found = proof("--break", "numpy RNG")
    assert not found.exact
    assert found.deterministic
    assert f"on rank 0: NumPy RNG\nlogs and records: {tmp_path}/tmp/" in found.verdict()
    assert (tmp_path / "tmp").joinpath(found.folder, "straight", "attempt1", "rank0.jsonl").exists()


def test_a_script_that_does_not_repeat_itself_is_said_not_to(proof, tmp_path):
    """Two uninterrupted runs differ: that is not the resume's fault, and the verdict says so."""
    found = proof("--drift", keep=str(tmp_path / "kept"))
    assert not found.exact
    assert not found.deterministic
    assert found.verdict().startswith(
        "not deterministic: two uninterrupted runs differ first at step 0 micro-batch 1 on rank 0: "
        "buffer model/norm.running_mean"
    )
    assert found.verdict().endswith(f"logs and records: {tmp_path}/kept")


def test_generators_that_were_never_seeded_are_in_the_verdict(proof):
    """The likeliest reason why a script does not repeat itself."""
    found = proof("--unseeded")
    assert not found.deterministic
    first, _ = found.verdict().splitlines()
    assert first.endswith("; never seeded: NumPy RNG, Python RNG, torch RNG")
    assert "Python RNG: never seeded by the script, so left out of the comparison" in proof.said
