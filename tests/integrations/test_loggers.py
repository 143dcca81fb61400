"""Lightning's loggers and the Trainer's `report_to` show each step once, without a word."""

from __future__ import annotations

import csv
import shutil

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.end_to_end.test_trackers import shown
from tests.integrations import transformers_training
from tests.integrations.lightning_training import Toy, fit
from trainckpt.attempt.record_writer import RecordWriter

pytestmark = pytest.mark.filterwarnings("ignore")

FAILURES = (1, 4, 6)  # steps, 3 in an epoch
KILLS = (3, 12, 17)  # micro-batches, 10 in an epoch: before the first snapshot, and in the second


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """More only wait for each other in so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cut_off(at):
    """A model with hyperparameters that fails in micro-batch `at`."""

    class Fails(Toy):
        def __init__(self, scheduler="step"):
            super().__init__(scheduler)
            self.save_hyperparameters()

        def training_step(self, batch, batch_idx):
            if self.trainer.fit_loop.total_batch_idx == at:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    return Fails


def logged_fit(folder, run=None, at=None):
    loggers = [TensorBoardLogger(folder, name="tb"), CSVLogger(folder, name="csv")]
    files = ModelCheckpoint(save_last=True)
    how = {"logger": loggers, "callbacks": [files], "enable_checkpointing": True}
    fit(run, module=cut_off(at), options={"every": "1 step"}, **how)
    loggers[0].finalize("success")


def rows(folder):
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_lightning_s_loggers_have_each_step_once_in_one_version_after_three_kills(tmp_path):
    """Without `version=`: each start would otherwise log into a new folder."""
    straight, folder = tmp_path / "straight", tmp_path / "logs"
    logged_fit(straight)
    for at in KILLS:
        with pytest.raises(ZeroDivisionError):
            logged_fit(folder, tmp_path / "run", at)
    logged_fit(folder, tmp_path / "run")
    versions = [path.name for path in folder.glob("*/version_*")]
    assert versions == ["version_0", "version_0"]
    assert shown(folder / "tb/version_0") == shown(straight / "tb/version_0")
    assert rows(folder) == rows(straight)
    ours, theirs = (at / "tb/version_0/checkpoints" for at in (folder, straight))
    assert names(ours) == names(theirs)


def test_a_copied_run_gets_a_version_of_its_own(tmp_path):
    with pytest.raises(ZeroDivisionError):
        logged_fit(tmp_path / "logs", tmp_path / "run", KILLS[1])
    before = shown(tmp_path / "logs/tb/version_0")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    logged_fit(tmp_path / "logs", tmp_path / "other")
    assert shown(tmp_path / "logs/tb/version_0") == before
    assert names(tmp_path / "logs/tb") == {"version_0", "version_1"}


def test_a_logger_put_before_the_others_gets_no_version_of_theirs(tmp_path):
    (tmp_path / "logs/csv/version_0").mkdir(parents=True)

    def fitted(*loggers):
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path / "run", module=cut_off(0), logger=list(loggers))

    fitted(CSVLogger(tmp_path / "logs", name="csv"))
    csv_logger = CSVLogger(tmp_path / "logs", name="csv")
    fitted(TensorBoardLogger(tmp_path / "logs", name="tb"), csv_logger)
    assert csv_logger.version == 1
    assert names(tmp_path / "logs/tb") == {"version_0"}


def test_versions_of_an_earlier_release_are_kept(tmp_path, monkeypatch):
    """Its record has neither classes nor the place of the run directory."""
    real = RecordWriter.set_facts

    def without_classes(writer, facts):
        if "lightning" in facts:
            facts = {"lightning": {"versions": [0, 0]}}
        real(writer, facts)

    with monkeypatch.context() as earlier:
        earlier.setattr(RecordWriter, "set_facts", without_classes)
        with pytest.raises(ZeroDivisionError):
            logged_fit(tmp_path / "logs", tmp_path / "run", KILLS[1])
    logged_fit(tmp_path / "logs", tmp_path / "run")
    assert names(tmp_path / "logs/tb") == names(tmp_path / "logs/csv") == {"version_0"}
    assert (tmp_path / "logs/tb/version_0/checkpoints").exists()


def names(folder):
    return {path.name for path in folder.iterdir()}


class Fails(transformers.TrainerCallback):
    """Fails at the end of a step."""

    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            raise ZeroDivisionError


def reported(folder, run=None, at=None, report_to="tensorboard"):
    how = {"report_to": report_to, "logging_steps": 1, "ours": {"every": "2 steps"}}
    training = transformers_training.Training(folder, {}, run, **how)
    training.trainer.add_callback(Fails(at))
    training.train()


def test_the_trainer_s_report_has_each_step_once_in_one_folder_after_three_kills(tmp_path):
    """Its default folder is named after the time of the start."""
    reported(tmp_path / "straight")
    for at in FAILURES:
        with pytest.raises(ZeroDivisionError):
            reported(tmp_path / "out", tmp_path / "run", at)
    reported(tmp_path / "out", tmp_path / "run")
    (straight,), (folder,) = ((tmp_path / name / "runs").iterdir() for name in ("straight", "out"))
    assert untimed(shown(folder)) == untimed(shown(straight))


def untimed(scalars):
    return {
        name: events
        for name, events in scalars.items()
        if "runtime" not in name and "per_second" not in name and "args" not in name
    }
