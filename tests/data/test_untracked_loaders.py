"""Workers of loaders that nobody tracks live through a signal to the group, and are not left."""

from __future__ import annotations

import gc
import os

import pytest
from torch.utils.data import DataLoader

from tests import warm
from tests.data.datasets import Plain
from tests.end_to_end.training import ACCUMULATE, Crash, Parts, record
from trainckpt import Checkpointer
from trainckpt.data.untracked import shield_all_loaders

SCRIPT = """
import os, subprocess, sys, time
import torch
from torch.utils.data import DataLoader
from tests.data.datasets import Plain
from trainckpt import Checkpointer

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
validation = DataLoader(Plain(), 4, num_workers=2, persistent_workers=True)
with Checkpointer(sys.argv[1], model=model, optimizer=optimizer, loader=DataLoader(Plain(), 4),
                  every="never") as ckpt:
    for epoch in ckpt.epochs(9999):
        for batch in ckpt.batches():
            model(batch.float()[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with ckpt.evaluation():
            for _ in validation:
                pass
            if epoch == 1:
                print(*(w.pid for w in validation._iterator._workers), flush=True)
                # (from outside: a worker takes its parent's signal for an order to end quietly)
                kill = ["sh", "-c", f"kill -TERM -{os.getpgrp()}"]
                subprocess.run(kill, start_new_session=True, check=True)
                time.sleep(0.5)  # what a killed worker would raise here
"""


def test_a_signal_to_the_group_kills_no_untracked_worker_and_the_stop_is_saved(server, tmp_path):
    done = warm.run(server, ["-c", SCRIPT, tmp_path / "run"])
    assert done.returncode == 75, done.stderr
    outcome = record(tmp_path / "run", 1)["outcome"]
    assert (outcome["outcome"], outcome["lost_micro_batches"]) == ("stopped", 0)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_workers_of_a_loader_that_the_collector_finds_end_without_a_word():
    shield_all_loaders()
    loader = DataLoader(Plain(), 4, num_workers=1, persistent_workers=True)
    for _ in loader:
        pass
    loader.itself = [loader]
    (worker,) = loader._iterator._workers
    del loader
    gc.collect()  # kills the workers before it has the iterator end them
    assert not worker.is_alive()


def validated(place, epochs, *, persistent, tracks=False):
    """Train so many epochs, each with a validation behind it."""
    parts = Parts()
    validation = DataLoader(Plain(), 4, num_workers=1, persistent_workers=persistent)
    tracked = {**parts.tracked(), "loader": [parts.loader, *([validation] if tracks else [])]}
    with Checkpointer(place, **tracked, every="never") as ckpt:
        validation = ckpt.loader(validation) if tracks else validation
        for _ in ckpt.epochs(epochs):
            for batch in ckpt.batches():
                parts.train_on(batch, ckpt.cursor.micro + 1 == ACCUMULATE)
            with ckpt.evaluation():
                for _ in validation:
                    pass
    if tracks:
        validation.shutdown()
    del validation, tracked  # and their workers: they would hold what later tests wait for
    gc.collect()
    return parts.state()


def test_a_resume_beside_untracked_workers_that_are_kept_is_not_called_bitwise(tmp_path, caplog):
    straight = validated(tmp_path / "straight", 2, persistent=True)
    validated(tmp_path / "run", 1, persistent=True)
    caplog.clear()
    assert validated(tmp_path / "run", 2, persistent=True) != straight
    told = [r.getMessage() for r in caplog.records if "persistent_workers" in r.getMessage()]
    assert len(told) == 1
    assert "ckpt.loader(" in told[0]
    assert record(tmp_path / "run", 2)["outcome"]["exactness"] == "same data, not bitwise"


@pytest.mark.parametrize("how", [{"persistent": False}, {"persistent": True, "tracks": True}])
def test_a_resume_beside_workers_that_are_tracked_or_not_kept_is_bitwise(tmp_path, caplog, how):
    straight = validated(tmp_path / "straight", 2, **how)
    validated(tmp_path / "run", 1, **how)
    assert validated(tmp_path / "run", 2, **how) == straight
    assert "persistent_workers" not in caplog.text
    assert record(tmp_path / "run", 2)["outcome"]["exactness"] == "bitwise"


def alive(pid):
    """It runs; one that ended, and that nobody has reaped yet, does not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def train_beside(place, way, stop=None):
    """Train one pass, and read another loader in this way; crash after micro-batch `stop`."""
    shield_all_loaders()  # as the first Checkpointer of a process does: `held` is made before it
    parts, side = Parts(), DataLoader(Plain(), 1)
    held = iter(side)
    if way == "before training":
        next(held)
    with Checkpointer(place, **parts.tracked(), every="1 steps") as ckpt:
        for _ in range(ckpt.cursor.micro_batches if way == "skipped by the script" else 0):
            next(held)
        for count, batch in enumerate(ckpt.batches(), 1):
            if way in ("in each batch", "skipped by the script"):
                next(held)
            elif way == "to its end":
                held = iter(side)
                for _ in held:
                    pass
            parts.train_on(batch, ckpt.cursor.micro + 1 == ACCUMULATE)
            if count == stop:
                raise Crash


@pytest.mark.parametrize(
    ("way", "is_named"),
    [
        ("in each batch", True),
        ("skipped by the script", False),
        ("before training", False),
        ("to its end", False),
    ],
)
def test_a_resume_names_an_untracked_loader_that_was_partly_read(tmp_path, caplog, way, is_named):
    with pytest.raises(Crash):
        train_beside(tmp_path / "run", way, ACCUMULATE + 1)
    gc.collect()  # the iterator of the failed script
    caplog.clear()
    train_beside(tmp_path / "run", way)
    found = "DataLoaders were partly read, not through ckpt.loader: Plain of 23 samples"
    assert (found in caplog.text) == is_named


class Numbered:
    """A loader with a state of its own, which reads a DataLoader."""

    def __init__(self, dataset):
        self.inner, self.position = DataLoader(dataset, 4), 0

    def __iter__(self):
        for number, batch in enumerate(self.inner):
            if number >= self.position:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def of_torchdata(dataset):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(dataset, 4)


@pytest.mark.parametrize("make", [of_torchdata, Numbered])
def test_the_loader_inside_a_tracked_one_counts_as_tracked(tmp_path, caplog, make):
    def train(stop=None):
        parts = Parts()
        tracked = parts.tracked()
        tracked["loader"] = make(tracked["loader"].dataset)
        with Checkpointer(tmp_path, **tracked, every="1 steps") as ckpt:
            for count, batch in enumerate(ckpt.batches(), 1):
                parts.train_on(batch, ckpt.cursor.micro + 1 == ACCUMULATE)
                if count == stop:
                    raise Crash
            return ckpt.resumed_from

    with pytest.raises(Crash):
        train(ACCUMULATE + 1)
    caplog.clear()
    assert train() is not None
    assert "partly read" not in caplog.text


MADE_BEFORE = """
import sys
import torch
from torch.utils.data import DataLoader
from tests.data.datasets import Plain
from trainckpt import Checkpointer

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sides = [iter(DataLoader(Plain(), 1))]
with Checkpointer(sys.argv[1], model=model, optimizer=optimizer, loader=DataLoader(Plain(), 4),
                  every="never") as ckpt:
    for batch in ckpt.batches():
        next(sides[0])
        model(batch.float()[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[2] == "ends" and ckpt.cursor.micro_batches == 1:
            save = ckpt.save()
        if sys.argv[2] == "ends" and ckpt.cursor.micro_batches == 3:
            save.wait()
            sys.exit(3)
"""


def test_an_iterator_made_before_the_checkpointer_is_found_in_the_script_s_variables(
    server, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(MADE_BEFORE, encoding="utf-8")
    assert warm.run(server, [script, tmp_path / "run", "ends"]).returncode == 3
    done = warm.run(server, [script, tmp_path / "run", "goes on"])
    assert done.returncode == 0, done.stderr
    assert "not through ckpt.loader: Plain of 23 samples after 2 batches" in done.stderr
