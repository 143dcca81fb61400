"""Random generators in variables of a script go on where they were."""

from __future__ import annotations

import contextlib
import logging
import runpy

import pytest

SCRIPT = """
import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainckpt import Checkpointer


class Crash(Exception):
    pass


place, stop, losses = ARGUMENTS
top = np.random.default_rng(1)
torch.manual_seed(0)


def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    order = torch.Generator().manual_seed(4)
    loader = DataLoader(torch.arange(16.0).view(8, 2), batch_size=2, shuffle=True, generator=order)
    python = random.Random(2)
    drawn = torch.Generator().manual_seed(3)
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader, every="1 steps") as c:
        for epoch in c.epochs(2):
            for batch in c.batches():
                noise = top.normal() + python.random() + torch.rand((), generator=drawn).item()
                loss = (model(batch) * noise).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
                if len(losses) == stop:
                    raise Crash("stopped")


main()
"""


@pytest.fixture
def run(tmp_path):
    def run(place, stop=None, text=SCRIPT):
        losses = []
        script = tmp_path / "script.py"
        script.write_text(text)
        arguments = {"ARGUMENTS": (tmp_path / place, stop, losses)}
        with pytest.raises(Exception, match="stopped") if stop else contextlib.nullcontext():
            runpy.run_path(str(script), arguments, run_name="__main__")
        return losses

    return run


INSIDE = {
    "in an object": """
class Noise:
    def __init__(self):
        self.parts = {"in": [np.random.default_rng(1)]}

top = Noise()
normal = lambda: top.parts["in"][0].normal()
""",
    "in a closure": """
def noise():
    generator = np.random.default_rng(1)
    return lambda: generator.normal()

normal = noise()
""",
    "in tracked attributes": """
from trainckpt import Attributes

class Noise:
    def __init__(self):
        self.rng, self.count = np.random.default_rng(1), 0

top = Noise()
normal = lambda: top.rng.normal()
""",
}


@pytest.mark.parametrize("place", INSIDE)
def test_a_generator_inside_a_variable_of_a_script_goes_on_where_it_was(run, caplog, place):
    caplog.set_level(logging.INFO, "trainckpt")
    text = SCRIPT.replace("top = np.random.default_rng(1)", INSIDE[place])
    text = text.replace("top.normal()", "normal()")
    if "Attributes" in text:
        text = text.replace(
            "optimizer=optimizer,", "optimizer=optimizer, a=Attributes(top, 'rng'),"
        )
    straight = run("straight", text=text)
    run("stopped", 4, text)
    rest = run("stopped", text=text)
    assert rest == straight[-len(rest) :]
    assert rest != straight[: len(rest)]
    assert "this resume is bitwise" in caplog.text
    assert "not bitwise" not in caplog.text


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_generators_in_variables_of_a_script_go_on_where_they_were(run, caplog, stop):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = run("straight")
    run("stopped", stop)
    rest = run("stopped")
    assert 0 < len(rest) < len(straight) == 8
    assert rest == straight[-len(rest) :]
    assert "this resume is bitwise" in caplog.text
    assert "not bitwise" not in caplog.text


def test_a_variable_without_its_generator_is_named(run, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    run("stopped", 3)
    in_a_list = SCRIPT.replace("top = np.random.default_rng(1)", "top = [np.random.default_rng(1)]")
    run("stopped", text=in_a_list.replace("top.normal", "top[0].normal"))
    assert "these names do not hold the saved generators: script.top" in caplog.text
    assert "same data, not bitwise" in caplog.text


def test_a_variable_with_a_generator_of_another_kind_is_named(run, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    run("stopped", 3)
    legacy = SCRIPT.replace("np.random.default_rng(1)", "np.random.RandomState(1)")
    run("stopped", text=legacy)
    assert "these names do not hold the saved generators: script.top" in caplog.text
    assert "same data, not bitwise" in caplog.text


@pytest.mark.parametrize("is_read", [False, True])
def test_a_generator_made_anew_at_each_epoch_s_end_is_named_only_if_it_is_read(
    run, caplog, is_read
):
    caplog.set_level(logging.INFO, "trainckpt")
    made = "            sampler = torch.Generator().manual_seed(3)\n"
    made += "            torch.rand(2, generator=sampler)\n"
    text = SCRIPT.replace("\n\nmain()\n", f"\n{made}\n\nmain()\n")
    if is_read:
        text = text.replace(
            "noise = top", "ahead = epoch and sampler.initial_seed()\n                noise = top"
        )
    straight = run("straight", text=text)
    run("stopped", 6, text)
    with pytest.raises(UnboundLocalError) if is_read else contextlib.nullcontext():
        rest = run("stopped", text=text)
        assert rest == straight[-len(rest) :]
    assert ("script.main.sampler" in caplog.text) == is_read
