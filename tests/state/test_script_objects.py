"""Objects of the script's own classes go on with their values, unless a part of them is lost."""

from __future__ import annotations

import logging
import runpy
import time
from textwrap import indent

import pytest

from trainckpt.ranks.world import World
from trainckpt.state import script_variables

SCRIPT = """
import time
import numpy, torch, trainckpt
from torch.utils.data import DataLoader, TensorDataset

class Stopping:
    def __init__(self, patience=3):
        self.patience, self.best, self.counter, self.say = patience, None, 0, print
    def __call__(self, score):
        if self.best is None or score < self.best:
            self.best, self.counter = score, 0
        else:
            self.counter += 1

class Meter:
    def __init__(self):
        self.sum = self.count = 0
        self.history = []
    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1
        self.history.append(value)

class Warming:
    def __init__(self, optimizer):
        self.optimizer, self.number = optimizer, 0
    def step(self):
        self.number += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.number
        self.optimizer.step()
    def zero_grad(self):
        self.optimizer.zero_grad()

class Decay:
    def __init__(self, model):
        self.weights, self.steps = [p.data for p in model.parameters()], 0
    def step(self):
        self.steps += 1
        for weight in self.weights:
            weight.mul_(0.9)

class Warm:
    rate = 0.1
    count = 0

class Cool(Warm):
    rate = 0.01

class World:
    def __init__(self):
        self.state, self.turn = numpy.zeros(2), 0
    def step(self):
        self.state, self.turn = self.state + [1, self.turn], self.turn + 1

class Buffer:
    def __init__(self):
        self.samples, self.size = numpy.zeros((64, 2, 4096)), 0  # 4 MiB
    def add(self, batch):
        self.samples[self.size] = batch.numpy()[:, None]
        self.size += 1

class Timer:
    def __init__(self):
        self.begun_s, self.laps = time.perf_counter(), 0
    def lap(self):
        self.begun_s, self.laps = time.perf_counter(), self.laps + 1

class Agent:
    def __init__(self):
        self.steps, self.stopping = 0, Stopping()
    def step(self):
        self.steps += 1
        self.stopping(numpy.float64(1 / self.steps))

class Log:
    def __init__(self, path):
        self.path, self.lines, self.file = path, 0, None
    def write(self, text):
        self.file, self.lines = open(self.path, "a"), self.lines + 1
        self.file.close()

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.rand(24).reshape(12, 2)), 2)
    save = None
{before}
    with trainckpt.Checkpointer(
        run, model=model, optimizer=optimizer, loader=loader, every="never"
    ) as ckpt:
        for epoch in ckpt.epochs(3):
            meter = Meter()
            for (batch,) in ckpt.batches():
                if save is not None:
                    save.wait()
                    raise Crash
                loss = model(batch).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
{body}
                if show({shown}) == stop:
                    save = ckpt.save()

main()
"""
KEPT = {
    "best score": ("stopping = Stopping()", "stopping(loss.item())", "dict(vars(stopping))"),
    "NumPy score": (
        "stopping = Stopping()",
        "stopping(numpy.float64(loss.item()))",
        "(stopping.best, stopping.counter, type(stopping.best))",
    ),
    "meter of an epoch": ("pass", "meter.update(loss.item())", "(meter.sum, meter.history[:])"),
    "inner object": ("agent = Agent()", "agent.step()", "(agent.steps, agent.stopping.best)"),
    "wrapped optimizer": (
        "warming = Warming(optimizer)",
        "warming.step()",
        "(warming.number, model.weight.tolist())",
    ),
}


class CrashError(Exception):
    """The end of an attempt."""


class Script:
    """Attempts of a script with these lines before and in its loop."""

    def __init__(self, folder, before, body, shown):
        self.folder = folder
        self._path = folder / "script.py"
        body = indent(body, " " * 16)
        text = SCRIPT.format(before=indent(before, "    "), body=body, shown=shown)
        self._path.write_text(text)

    def attempt(self, place, stop=None):
        """Return what is shown after each batch, up to the save after batch `stop`."""
        seen = []

        def show(value):
            seen.append(value)
            return len(seen)

        given = {"run": str(self.folder / place), "stop": stop, "show": show, "Crash": CrashError}
        try:
            runpy.run_path(str(self._path), given, run_name="__main__")
        except CrashError:
            assert stop is not None
        return seen


@pytest.mark.parametrize("stop", [4, 8])
@pytest.mark.parametrize("case", KEPT)
def test_they_go_on_as_if_never_stopped(tmp_path, caplog, case, stop):
    script = Script(tmp_path, *KEPT[case])
    whole = script.attempt("straight")
    assert script.attempt("run", stop) == whole[:stop]
    caplog.set_level(logging.INFO, "trainckpt")
    assert script.attempt("run") == whole[stop:]
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text


LEFT = {
    "an array": ("agent, world = Agent(), World()", "world.step()"),
    "samples in another object": ("agent, buffer = Agent(), Buffer()", "buffer.add(batch[0])"),
    "samples in a variable": ("agent, pool = Agent(), []", "pool.append(batch)\nsum(pool)"),
    "a file": ("agent, log = Agent(), Log(str(run) + '.txt')\nagent.log = log", "log.write('')"),
}


@pytest.mark.parametrize("case", LEFT)
def test_none_goes_on_if_what_it_may_belong_to_is_lost(tmp_path, caplog, case):
    before, body = LEFT[case]
    script = Script(tmp_path, before, f"{body}\nagent.step()", "agent.steps")
    assert script.attempt("run", 8) == [*range(1, 9)]
    caplog.set_level(logging.INFO, "trainckpt")
    assert script.attempt("run") == [*range(1, 11)]
    assert "are not as when it was saved" in caplog.text


@pytest.mark.filterwarnings("ignore:loader. dataset.reads changes from batch to batch")
def test_the_data_of_a_loader_is_left_to_it(tmp_path, caplog):
    before = (
        "class Data(TensorDataset):\n    reads = 0\n"
        "    def __getitem__(self, index):\n        self.reads += 1\n"
        "        return super().__getitem__(index)\n"
        "data = Data(*loader.dataset.tensors)\nloader = DataLoader(data, 2)"
    )
    script = Script(tmp_path, before, "pass", "data.reads")
    assert script.attempt("run", 4) == [2, 4, 6, 8]
    assert script.attempt("run")[0] == 2


def test_a_reading_of_a_clock_is_left_as_this_process_has_it(tmp_path):
    script = Script(tmp_path, "timer = Timer()", "pass", "(timer.begun_s, timer.lap())[0]")
    script.attempt("run", 8)
    between_s = time.perf_counter()
    assert script.attempt("run")[0] > between_s


def test_an_object_of_another_class_gets_no_values_of_the_one_before(tmp_path):
    body = "if ckpt.cursor.step == 3:\n    phase = Cool()\nphase.count += 1"
    script = Script(tmp_path, "phase = Warm()", body, "(type(phase).__name__, phase.count)")
    script.attempt("run", 8)
    assert script.attempt("run")[0] == ("Warm", 1)


def test_ranks_of_a_larger_run_are_left_as_the_script_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(script_variables, "current_world", lambda: World(0, 2, 0, "here"))
    script = Script(tmp_path, "agent = Agent()", "agent.step()", "agent.steps")
    script.attempt("run", 8)
    assert script.attempt("run")[0] == 1


def test_tensors_that_are_shared_with_the_model_stay_shared(tmp_path):
    script = Script(tmp_path, "decay = Decay(model)", "decay.step()", "model.weight.tolist()")
    whole = script.attempt("straight")
    script.attempt("run", 8)
    assert script.attempt("run") == whole[8:]


TWICE = """
import torch, trainckpt
from torch.utils.data import DataLoader, TensorDataset

class Results:
    def __init__(self):
        self.rows = []

def train(run, results):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.rand(24).reshape(12, 2)), 2)
    with trainckpt.Checkpointer(run, model=model, loader=loader, every="never") as ckpt:
        for batch, in ckpt.batches():
            results.rows.append(batch.sum().item())
            if ckpt.cursor.batches == 4:
                break  # the last save follows

results = Results()
train(run, results)
train(other, results)
train(run, results)
show(results.rows)
"""


def test_one_that_has_trained_in_another_run_since_is_left_as_it_is(tmp_path):
    path, shown = tmp_path / "twice.py", []
    path.write_text(TWICE)
    places = {name: str(tmp_path / name) for name in ("run", "other")}
    given = {**places, "show": shown.append}
    runpy.run_path(str(path), given, run_name="__main__")
    assert [type(row) for row in shown[0]] == [float] * 11
