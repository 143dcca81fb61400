"""Each step once in what a tracker shows, after three SIGKILLs or two stops of its process."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.test_trackers import CRASHES
from tests.end_to_end.test_trackers import shown as shown_by_tensorboard
from tests.end_to_end.training import usable

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

# Micro-batches, or steps of the Trainer; the first kill is before a snapshot.
KILLS = {"plain": CRASHES, "lightning": (3, 12, 17), "transformers": (1, 4, 6)}
LIMIT_S = 240  # of a process; it takes some 10 s


def start(loop, tracker, folder, run="-", kill_at="-", *how):
    """Train in a process; its exit code."""
    words = [loop, tracker, folder, run, kill_at, *how]
    command = [sys.executable, "-m", "tests.acceptance.tracked_script", *map(str, words)]
    environment = {**os.environ, "WANDB_SILENT": "true", "TQDM_DISABLE": "1"}
    return subprocess.run(command, env=environment, timeout=LIMIT_S, check=False).returncode


def in_tensorboard(folder):
    (place,) = {path.parent for path in folder.rglob("events.out.tfevents*")}
    return shown_by_tensorboard(place)


def in_csv(folder):
    (file,) = folder.rglob("metrics.csv")
    with file.open() as rows:
        return list(csv.DictReader(rows))


def in_mlflow(folder):
    from tests.acceptance import test_trackers

    test_trackers.mlflow.set_tracking_uri(f"sqlite:///{folder}.db")
    found = test_trackers.shown()
    if "epoch" in found:
        # At its end the Trainer logs the last epoch three times, and of rows of one millisecond
        # MLflow keeps one.
        found["epoch"] = sorted(set(found["epoch"]))
    return found


def in_wandb(folder):
    """Return the rows of all files, as W&B's own reader prints them."""
    files = sorted(folder.rglob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({path.name for path in files}) == 1, "one run id"
    rows = []
    for path in files:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", path]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        records = map(json.loads, lines.splitlines())
        rows += [one["history"]["item"] for one in records if one["type"] == "history"]
    return rows


READERS = {"tensorboard": in_tensorboard, "csv": in_csv, "mlflow": in_mlflow, "wandb": in_wandb}


def untimed(values):
    """Leave out what says how long something took."""
    if isinstance(values, list):
        return [untimed(value) for value in values] if values and is_row(values[0]) else values
    words = ("runtime", "per_second", "timestamp", "args")
    return {name: values[name] for name in values if not any(word in name for word in words)}


def is_row(value):
    return isinstance(value, dict)


@pytest.mark.parametrize(
    ("loop", "tracker"),
    [
        ("plain", "tensorboard"),
        ("plain", "mlflow"),
        ("plain", "wandb"),
        ("plain", "wandb with an id"),
        ("lightning", "csv"),
        ("lightning", "wandb"),
        ("transformers", "wandb"),
        ("transformers", "mlflow"),
    ],
)
def test_each_step_is_there_once_after_three_sigkills(tmp_path, loop, tracker):
    read = READERS[tracker.partition(" ")[0]]
    assert start(loop, tracker, tmp_path / "whole") == 0
    for kill_at in KILLS[loop]:
        code = start(loop, tracker, tmp_path / "logs", tmp_path / "run", kill_at)
        assert code == -signal.SIGKILL
    assert start(loop, tracker, tmp_path / "logs", tmp_path / "run") == 0
    expected = untimed(read(tmp_path / "whole"))
    assert expected
    assert untimed(read(tmp_path / "logs")) == expected
    if loop == "lightning":
        (_,) = (tmp_path / "logs").rglob("checkpoints")  # named after the logger's version


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_each_step_is_there_once_after_stops_inside_a_window_of_each_epoch(
    tmp_path, tracker, workers
):
    read, run = READERS[tracker], tmp_path / "run"
    assert start("plain", tracker, tmp_path / "whole", "-", "-", "-", workers) == 0
    for leave_at, snapshot in ((2, "s1m1"), (6, "s3m1")):
        assert start("plain", tracker, tmp_path / "logs", run, "-", leave_at, workers) == 0
        assert usable(run)[-1].startswith(snapshot)
    assert start("plain", tracker, tmp_path / "logs", run, "-", "-", workers) == 0
    assert untimed(read(tmp_path / "logs")) == untimed(read(tmp_path / "whole"))
