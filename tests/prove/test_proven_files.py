"""A proof writes to the script's own files, and puts back what the tracked ones held before."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

import trainckpt
from trainckpt.errors import ConfigurationError
from trainckpt.prove.proof import ScriptFailed, prove
from trainckpt.recording import script_files
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.state.registry import Registry

STEPS = 12
SCRIPT = """
import sys
import torch
import trainckpt

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn({items}, 2))
loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
with trainckpt.Checkpointer(
    "run", model=model, optimizer=optimizer, loader=loader, every="3 steps"
) as ckpt:
    for name in ("metrics.csv", "new.csv"):
        ckpt.track_file(name)
    for _ in ckpt.epochs(1):
        for (x,) in ckpt.batches():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name in ("metrics.csv", "new.csv"):
                with open(name, "a") as file:
                    file.write(f"{{ckpt.cursor.step}}\\n")
{end}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """In a folder with a metrics.csv of the user's own; the scripts' threads are few."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "metrics.csv").write_text("0\n1\n2\n")

    def write(end=""):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(items=2 * STEPS, end=end))
        return [str(path)]

    return write


def proven(command, tmp_path, said):
    return prove(command, stops=2, nproc=None, keep=str(tmp_path / "proof"), say=said.append)


def left(tmp_path):
    """Files of the user's, with what they hold."""
    return {file.name: file.read_text() for file in tmp_path.glob("*.csv*")}


def test_tracked_files_hold_what_they_held_before_the_proof(tmp_path, script):
    said = []
    inode = (tmp_path / "metrics.csv").stat().st_ino
    assert proven(script(), tmp_path, said).exact
    assert left(tmp_path) == {"metrics.csv": "0\n1\n2\n"}
    assert (tmp_path / "metrics.csv").stat().st_ino == inode
    assert f"{tmp_path / 'metrics.csv'} holds again the 6 bytes it held before" in said
    assert not (tmp_path / "proof/files").exists()


def test_also_after_a_proof_that_fails(tmp_path, script):
    with pytest.raises(ScriptFailed):
        proven(script("raise ValueError"), tmp_path, [])
    assert left(tmp_path) == {"metrics.csv": "0\n1\n2\n"}


def test_also_after_one_that_is_interrupted(tmp_path, script):
    def interrupted(line):
        if line.startswith("interrupted"):
            raise KeyboardInterrupt

    said = SimpleNamespace(append=interrupted)
    with pytest.raises(KeyboardInterrupt):
        proven(script(), tmp_path, said)
    assert left(tmp_path) == {"metrics.csv": "0\n1\n2\n"}


@pytest.fixture
def in_proof(tmp_path, monkeypatch):
    """This process is a rank under proof; returns who tracks a file in a run of the user's."""
    plan = {"dir": str(tmp_path), "place": str(tmp_path / "place"), "files": str(tmp_path / "kept")}
    monkeypatch.setenv(PROVE_VARIABLE, json.dumps(plan))
    return lambda file: script_files.tracked_files(Registry(), tmp_path / "run").track(file)


def test_what_a_killed_proof_has_left_is_refused_and_stays(tmp_path, in_proof):
    """Which of the two is right, the copy or a file that has grown since, nobody here knows."""
    file, copy = tmp_path / "m.csv", tmp_path / "m.csv.before-proof"
    file.write_text("1\n2\n")
    copy.write_text("1\n")
    with pytest.raises(ConfigurationError, match="which was killed or still runs") as refused:
        in_proof(file)
    assert f"mv {copy} {file}" in refused.value.hint
    assert (file.read_text(), copy.read_text()) == ("1\n2\n", "1\n")
    assert script_files.restore_files(tmp_path / "kept") == []


def test_a_run_that_is_training_keeps_its_file_to_itself(tmp_path, monkeypatch, in_proof):
    file = tmp_path / "m.csv"
    file.write_text("1\n")
    plan = os.environ.pop(PROVE_VARIABLE)
    with trainckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.boundary()
        monkeypatch.setenv(PROVE_VARIABLE, plan)
        with pytest.raises(ConfigurationError, match="is training, and a proof would write to"):
            in_proof(file)
        monkeypatch.delenv(PROVE_VARIABLE)
    monkeypatch.setenv(PROVE_VARIABLE, plan)
    in_proof(file)
    file.write_text("1\n2\n")
    script_files.restore_files(tmp_path / "kept")
    assert file.read_text() == "1\n"


@pytest.mark.parametrize("now", ["", "other bytes", "1\n", None], ids=repr)
def test_whatever_a_script_made_of_its_file_it_is_as_it_was(tmp_path, in_proof, now):
    file = tmp_path / "m.csv"
    file.write_text("1\n2\n")
    in_proof(file)
    in_proof(file)  # the next attempt of the same proof keeps nothing anew
    file.unlink() if now is None else file.write_text(now)
    (said,) = script_files.restore_files(tmp_path / "kept")
    assert "holds again the 4 bytes" in said
    assert [f.read_text() for f in tmp_path.glob("m.csv*")] == ["1\n2\n"]


def test_what_cannot_be_put_back_is_named_with_its_copy(tmp_path, in_proof):
    file = tmp_path / "m.csv"
    file.write_text("1\n")
    in_proof(file)
    file.unlink()
    file.mkdir()
    (said,) = script_files.restore_files(tmp_path / "kept")
    assert f"what it held is in {file}.before-proof" in said
    assert (tmp_path / "m.csv.before-proof").read_text() == "1\n"
