"""Offline runs of Weights & Biases: which rows a resume cuts off, and which it logs again."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from tests.acceptance.test_tracker_kills import in_wandb, untimed
from tests.end_to_end.test_trackers import MICRO_BATCHES, killed, train, with_three_kills
from tests.end_to_end.training import Parts
from tests.integrations import test_loggers
from tests.integrations.lightning_training import fit
from trainckpt import Checkpointer
from trainckpt.attempt.wandb_run import finish
from trainckpt.errors import ConfigurationError

with suppress(ImportError):  # collected by `make test` too, which does not run it
    import wandb

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if wandb.run is not None:
        wandb.run.finish()


def logs_to(folder, **settings):
    """What opens a run; the one before is whole in its file, also what came after the snapshot."""
    folder.mkdir()

    def open_log(ckpt):
        if wandb.run is not None:
            finish(wandb.run)
        run = wandb.init(mode="offline", dir=folder, **settings)
        run.log({"script": 1.0})  # before the line, so a resume drops it
        run = ckpt.track_run(run)
        return lambda name, value, at: run.log({name: value, f"{name} at": at})

    return open_log


def rows(folder):
    finish(wandb.run)
    return untimed(in_wandb(folder))


@pytest.mark.parametrize("settings", [{}, {"id": "own"}], ids=["new ids", "one id"])
def test_rows_in_the_files_are_cut_off_after_three_kills(tmp_path, settings):
    train(tmp_path / "straight", logs_to(tmp_path / "whole", **settings))
    expected = rows(tmp_path / "whole")
    with_three_kills(tmp_path / "run", logs_to(tmp_path / "logs", **settings))
    assert rows(tmp_path / "logs") == expected


def test_rows_that_are_in_the_file_at_a_snapshot_stay_and_later_ones_are_cut_off(tmp_path):
    def open_log(folder):
        opened = logs_to(folder, settings={"x_transaction_log_flush_interval": 0.01})

        def open_(ckpt):
            log = opened(ckpt)
            (tracked,) = ckpt._registry.runs.values()

            def logs(name, value, at):
                log(name, value, at)
                while tracked._rows.unwritten:
                    tracked._rows.forget_written()

            return logs

        return open_

    train(tmp_path / "straight", open_log(tmp_path / "whole"))
    expected = rows(tmp_path / "whole")
    with_three_kills(tmp_path / "run", open_log(tmp_path / "logs"))
    assert rows(tmp_path / "logs") == expected
    asides = list(tmp_path.rglob("*.wandb.after-*"))
    assert any(path.with_suffix("").exists() for path in asides), "cut off within a file"


def test_the_whole_file_stays_beside_the_one_that_was_cut(tmp_path):
    killed(tmp_path / "run", logs_to(tmp_path / "logs"), crash_at=6)
    finish(wandb.run)
    file = max(tmp_path.rglob("*.wandb"))
    whole = file.read_bytes()
    train(tmp_path / "run", logs_to(tmp_path / "other"))
    (aside,) = tmp_path.rglob("*.wandb.after-2")
    assert aside.read_bytes() == whole
    assert not file.exists() or whole.startswith(file.read_bytes())
    assert not list(tmp_path.glob("other/wandb/offline-*")), "the run goes on in its first folder"


def test_a_row_that_is_not_complete_at_a_snapshot_is_completed_after_a_resume(tmp_path):
    """W&B keeps a row of an explicit step open until one of a later step comes."""

    def open_log(folder):
        opened = logs_to(folder)

        def open_(ckpt):
            opened(ckpt)
            # Saves come after 4 and after 8.
            return lambda name, value, at: wandb.log({f"{name} {at % 3}": value}, step=10 + at // 3)

        return open_

    train(tmp_path / "straight", open_log(tmp_path / "whole"))
    expected = rows(tmp_path / "whole")
    with_three_kills(tmp_path / "run", open_log(tmp_path / "logs"))
    assert rows(tmp_path / "logs") == expected


def test_another_id_gets_config_metrics_and_rows_of_the_script_s_run(tmp_path):
    def open_log(ckpt):
        if wandb.run is not None:
            finish(wandb.run)
        run = wandb.init(mode="offline", dir=tmp_path, config={"lr": 1})
        run.define_metric("at")
        run.define_metric("*", step_metric="at", step_sync=True)
        run.define_metric("loss", summary="min", hidden=True)
        run.config.update({"b": 2})
        ckpt.track_run(run)
        return lambda name, value, at: run.log({name: value})

    killed(tmp_path / "run", open_log, crash_at=6)
    first = metrics_of(wandb.run)
    train(tmp_path / "run", open_log)
    assert dict(wandb.run.config) == {"lr": 1, "b": 2}
    assert metrics_of(wandb.run) == first
    assert len(first) == 3
    assert [row["_step"] for row in in_wandb(tmp_path)] == list(range(MICRO_BATCHES + 2))


def metrics_of(run):
    """Finish a run; the metrics that it has defined."""
    records = finish(run)
    return [str(one.metric) for one in records if one.WhichOneof("record_type") == "metric"]


def test_files_of_another_run_in_the_folder_are_left(tmp_path):
    other = wandb.init(mode="offline", dir=tmp_path, id="other")
    other.log({"loss": 1.0})
    finish(other)
    (file,) = tmp_path.rglob("*.wandb")
    whole = file.read_bytes()
    folder = tmp_path / "logs"
    killed(tmp_path / "run", logs_to(folder), crash_at=6)
    train(tmp_path / "run", logs_to(tmp_path / "more"))
    assert file.read_bytes() == whole


def test_a_disabled_run_is_refused(tmp_path):
    with Checkpointer(tmp_path / "run", **Parts().tracked()) as ckpt:
        disabled = wandb.init(mode="disabled")
        with pytest.raises(ConfigurationError, match="a disabled run of W&B logs nothing"):
            ckpt.track_run(disabled)


def test_characters_of_a_pattern_in_an_id_stand_for_themselves(tmp_path):
    folder, ids = tmp_path / "logs", {"id": "lr[39]"}
    killed(tmp_path / "run", logs_to(folder, **ids), crash_at=6)
    finish(wandb.run)
    other = wandb.init(mode="offline", dir=folder, id="lr3")
    other.log({"loss": 1.0})
    finish(other)
    (file,) = folder.rglob("run-lr3.wandb")
    train(tmp_path / "run", logs_to(tmp_path / "more", **ids))
    assert file.exists()
    assert list(folder.rglob("run-lr[[]39].wandb.after-*")), "the run's own is cut"


def test_a_folder_that_is_closed_to_a_start_leaves_its_rows_where_the_script_logs(tmp_path, caplog):
    killed(tmp_path / "run", logs_to(tmp_path / "logs"), crash_at=6)
    run_id = wandb.run.id
    finish(wandb.run)
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").touch()  # stands for a parent that another user owns
    train(tmp_path / "run", logs_to(tmp_path / "other"))
    assert wandb.run.id == run_id
    assert [row.get("loss at") for row in rows(tmp_path / "other") if "loss at" in row] == [
        *range(MICRO_BATCHES)
    ], "those before the snapshot too: the file had none of them"
    assert "is closed to this start" in caplog.text


def test_a_run_that_cannot_be_opened_again_ends_no_training_and_waits_for_the_next_attempt(
    tmp_path, monkeypatch
):
    def fails(*_, **how):
        raise wandb.errors.CommError("the service did not start")

    def open_and_break(ckpt):
        finish(wandb.run)
        run = wandb.init(mode="offline", dir=tmp_path)
        with monkeypatch.context() as broken:
            broken.setattr(wandb, "init", fails)
            run = ckpt.track_run(run)
        return lambda name, value, at: run.log({name: value})

    opens = logs_to(tmp_path / "logs")
    killed(tmp_path / "run", opens, crash_at=6)
    killed(tmp_path / "run", open_and_break, crash_at=9)
    train(tmp_path / "run", logs_to(tmp_path / "more"))
    logged = [row["loss at"] for row in rows(tmp_path / "logs") if "loss at" in row]
    assert logged == [0, 1, 2, 3, 8, 9], "the second attempt's four are not there, and no other"


def test_rows_go_to_a_new_run_where_w_and_b_refuses_the_id(tmp_path, monkeypatch, caplog):
    """As a service does that still has the run of a killed attempt open."""
    folder, real = tmp_path / "logs", wandb.init
    killed(tmp_path / "run", logs_to(folder), crash_at=6)
    refused = wandb.run.id
    finish(wandb.run)

    def refuses(*_, **how):
        if how.get("id") == refused:
            raise wandb.errors.CommError(f"run ID {refused} is in use")
        return real(**how)

    monkeypatch.setattr(wandb, "init", refuses)
    train(tmp_path / "run", logs_to(tmp_path / "more"))
    new = wandb.run.id
    logged = [row for row in rows_of(tmp_path / "more", new) if "loss at" in row]
    assert [row["loss at"] for row in logged] == [4, 5, 6, 7, 8, 9]
    assert f"W&B opens run {refused} no more, so rows go to the new run {new}" in caplog.text


def rows_of(folder, run_id):
    """Return the rows of one of the folder's runs."""
    finish(wandb.run)
    for path in folder.glob("wandb/offline-run-*"):
        if not path.name.endswith(run_id):
            shutil.rmtree(path)
    return in_wandb(folder)


def test_a_folder_that_is_lost_amid_training_ends_no_training(tmp_path, caplog):
    def open_log(ckpt):
        log = logs_to(tmp_path / "logs")(ckpt)
        shutil.rmtree(tmp_path / "logs")

        def many(name, value, at):
            for _ in range(1200 if name == "loss" else 1):
                log(name, value, at)

        return many

    train(tmp_path / "run", open_log)
    assert caplog.text.count("a resume may lack rows of W&B's") == 1


def test_lightning_leaves_a_run_that_the_script_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        logged_fit(tmp_path, WandbLogger(mode="offline", save_dir=tmp_path))
    finish(wandb.run)
    run = wandb.init(mode="offline", dir=tmp_path)
    with pytest.raises(ZeroDivisionError):
        logged_fit(tmp_path, WandbLogger(experiment=run))
    run.log({"after": 1.0})


def test_lightning_s_logger_before_another_one_gets_an_id_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        logged_fit(tmp_path, CSVLogger(tmp_path))
    with pytest.raises(ZeroDivisionError):
        logged_fit(tmp_path, WandbLogger(mode="offline", save_dir=tmp_path), CSVLogger(tmp_path))
    assert len(wandb.run.id) == 8


def logged_fit(folder, *loggers):
    fit(folder / "run", module=test_loggers.cut_off(0), logger=list(loggers))
