"""Files of ModelCheckpoint after an attempt was cut off are those of the run that never was.

An attempt fails between two saves, as a SIGKILL ends it: what it wrote since the last one is there,
and the snapshot that is gone on from knows nothing of it.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.integrations.lightning_training import StopAt, Toy, fit
from tests.integrations.test_lightning import weights_in
from trainckpt.integrations import lightning_callback
from trainckpt.integrations.lightning_state import HookState
from trainckpt.run_directory.run_url import PROVE_VARIABLE, WORK

pytestmark = pytest.mark.filterwarnings("ignore")

HOW = {"enable_checkpointing": True, "val_check_interval": 5}
# An epoch has 10 micro-batches and 3 steps: saved after the 8th, lost with the first epoch's end.
SAVED = {"a snapshot": {"every": "2 steps"}, "no snapshot": {"every": "1000 steps"}}


def test_the_score_that_lightning_does_not_load_is_kept():
    """It is in ModelCheckpoint's state_dict, and its load_state_dict leaves it out."""
    one, other = ModelCheckpoint(monitor="loss"), ModelCheckpoint(monitor="loss")
    one.current_score = torch.tensor(0.5)
    trainer = {"datamodule": None, "lightning_module": nn.Module(), "current_epoch": 0}
    saved, loaded = (
        HookState(SimpleNamespace(**trainer, global_step=0, callbacks=[callback]), None, {})
        for callback in (one, other)
    )
    loaded.load_state_dict(saved.state_dict())
    assert other.current_score == torch.tensor(0.5)


def test_in_a_proof_the_files_lie_in_the_run_s_own_folder(tmp_path, monkeypatch):
    """Else the next run of the proof finds `last.ckpt`, and writes `last-v1.ckpt`."""
    callback = ModelCheckpoint(dirpath="/scratch/checkpoints")
    monkeypatch.setenv(PROVE_VARIABLE, json.dumps({WORK: str(tmp_path)}))
    lightning_callback.redirect_in_proof(SimpleNamespace(callbacks=[callback]))
    assert callback.dirpath == f"{tmp_path}/scratch/checkpoints"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """More only wait for each other in so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class CutOff(Toy):
    """Fails in its 13th micro-batch, three after the first epoch's end."""

    def training_step(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 12:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def own(folder, name="{epoch}-{step}"):
    """The best two and the last; and one file a step, which Lightning numbers by itself."""
    steps = {"every_n_train_steps": 1, "save_top_k": -1}
    return [
        ModelCheckpoint(folder, name, "val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(folder, "{epoch}-every", "loss", **steps),
    ]


def cut_off(run, folder, options):
    with pytest.raises(ZeroDivisionError):
        fit(run, module=CutOff, callbacks=own(folder), options=options, **HOW)


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_what_a_cut_off_attempt_wrote_is_written_again_under_its_own_names(tmp_path, saved):
    folders = [tmp_path / name for name in ("straight", "cut", "run")]
    fit(callbacks=own(folders[0]), **HOW)
    expected = weights_in(folders[0])
    assert {"last.ckpt", "epoch=0-every.ckpt", "epoch=0-every-v1.ckpt"} < set(expected)
    cut_off(folders[2], folders[1], SAVED[saved])
    assert (folders[1] / "last.ckpt").exists()
    cut_off(folders[2], folders[1], SAVED[saved])  # once more, before it has saved anything
    ended = fit(folders[2], callbacks=own(folders[1]), **HOW)
    assert weights_in(folders[1]) == expected
    assert ended.trainer.checkpoint_callback.last_model_path == str(folders[1] / "last.ckpt")


def test_the_last_file_is_the_newest_after_two_resumes(tmp_path):
    """EgoVerse#621: a version counter wrote last-v1.ckpt, and each resume read last.ckpt."""
    folders = [tmp_path / name for name in ("straight", "own", "run")]
    fit(callbacks=own(folders[0]), **HOW)
    for stop in (12, 7):
        fit(folders[2], stop=StopAt(stop), callbacks=own(folders[1]), **HOW)
        assert [file.name for file in folders[1].glob("last*")] == ["last.ckpt"]
    fit(folders[2], callbacks=own(folders[1]), **HOW)
    assert weights_in(folders[1]) == weights_in(folders[0])


def test_the_best_file_survives_a_resume_with_another_folder(tmp_path):
    """lightning#12724."""

    def best(name):
        return [ModelCheckpoint(tmp_path / name, "best", "val_loss")]

    fit(tmp_path / "run", stop=StopAt(12), callbacks=best("one"), **HOW)
    before = weights_in(tmp_path / "one")
    fit(tmp_path / "run", callbacks=best("other"), **HOW)
    assert weights_in(tmp_path / "one") == before
    assert before


def test_files_of_somebody_else_keep_their_names_and_what_is_in_them(tmp_path):
    folder, names = tmp_path / "own", ("last.ckpt", "epoch=0-every.ckpt")
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"of somebody else")
    cut_off(tmp_path / "run", folder, SAVED["a snapshot"])
    fit(tmp_path / "run", callbacks=own(folder), **HOW)
    assert [(folder / name).read_bytes() for name in names] == [b"of somebody else"] * 2
    there = {file.name for file in folder.iterdir()}
    assert {"last-v1.ckpt", "epoch=0-every-v3.ckpt"} < there
    assert not {"last-v2.ckpt", "epoch=0-every-v4.ckpt"} & there


@pytest.mark.parametrize("how", ["never", "at"])
def test_files_of_a_branch_that_was_left_on_purpose_are_kept(tmp_path, monkeypatch, how):
    """Its snapshots are kept too."""
    folder = tmp_path / "own"
    fit(tmp_path / "run", stop=StopAt(3), callbacks=own(folder), **HOW)
    fit(tmp_path / "run", stop=StopAt(12), callbacks=own(folder), **HOW)
    branch = weights_in(folder)
    if how == "at":
        monkeypatch.setenv("TRAINCKPT_RESUME_AT", "s1")
    options = {"resume": "never"} if how == "never" else {}
    fit(tmp_path / "run", stop=StopAt(12), callbacks=own(folder), options=options, **HOW)
    after = weights_in(folder)
    assert {name: after[name] for name in branch} == branch
    assert len(after) > len(branch)


def test_a_fit_that_has_finished_leaves_its_files_alone_when_it_is_started_again(tmp_path, caplog):
    folder = tmp_path / "own"
    fit(tmp_path / "run", callbacks=own(folder), **HOW)
    before = weights_in(folder)
    fit(tmp_path / "run", callbacks=own(folder), seed=99, **HOW)
    assert weights_in(folder) == before
    assert left(caplog) == []


def test_what_was_not_written_again_is_named_and_stays(tmp_path, caplog):
    folder = tmp_path / "own"
    cut_off(tmp_path / "run", folder, SAVED["a snapshot"])
    fit(tmp_path / "run", callbacks=own(folder, "other-{step}"), **HOW)
    old = folder / "epoch=0-step=3.ckpt"
    assert old.exists()
    assert left(caplog) == [str(old)]


def left(caplog):
    """Files of which the log says that they do not belong to the run."""
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [
        line.partition(" is of an interrupted attempt")[0]
        for line in warned
        if "is of an interrupted" in line
    ]


def test_a_record_holds_the_newest_names_only(tmp_path, monkeypatch):
    monkeypatch.setattr(lightning_callback, "MOST", 2)
    fit(tmp_path, callbacks=own(tmp_path / "own"), **HOW)
    assert (tmp_path / "attempts/1.json").read_text().count(".ckpt") == 2
