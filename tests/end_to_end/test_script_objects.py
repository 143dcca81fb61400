"""Attributes of the script's own objects with too large arrays: a resume restores none of them."""

from __future__ import annotations

import contextlib
import logging
import runpy

import pytest

SCRIPT = """
import numpy as np
import torch

from trainckpt import Checkpointer


class Crash(Exception):
    pass


class Walk:
    def __init__(self):
        self.drawn = np.random.default_rng(0)

    def reset(self):
        self.state, self.time = np.zeros((1 << 17, 2)), 0  # 2 MiB

    def step(self):
        self.time += 1
        self.state = self.state + self.drawn.normal(size=2)
        return torch.tensor(self.state[0], dtype=torch.float32)


place, stop, losses = ARGUMENTS
torch.manual_seed(0)
model, walk = torch.nn.Linear(2, 1), Walk()
BEGIN
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with Checkpointer(place, model=model, optimizer=optimizer, every="1 steps") as ckpt:
    for episode in range(ckpt.cursor.micro_batches, 8):
        ckpt.boundary()
        HEAD
        loss = model(torch.stack([walk.step() for _ in range(3)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if len(losses) == stop:
            raise Crash("stopped")
"""


@pytest.mark.parametrize("is_reset", [True, False])
def test_an_attribute_is_named_only_if_it_is_read_before_it_is_set(tmp_path, caplog, is_reset):
    caplog.set_level(logging.INFO, "trainckpt")
    script = tmp_path / "script.py"
    text = SCRIPT.replace("HEAD", "walk.reset()" if is_reset else "pass")
    script.write_text(text.replace("BEGIN", "" if is_reset else "walk.reset()"))

    def run(place, stop=None):
        losses = []
        arguments = {"ARGUMENTS": (tmp_path / place, stop, losses)}
        with pytest.raises(Exception, match="stopped") if stop else contextlib.nullcontext():
            runpy.run_path(str(script), arguments, run_name="__main__")
        return losses

    straight = run("straight")
    run("run", stop=4)
    rest = run("run")
    assert (rest == straight[-len(rest) :]) == is_reset
    assert ("walk.state" in caplog.text) != is_reset
    assert ("walk.time" in caplog.text) != is_reset
    assert ("this resume is bitwise" in caplog.text) == is_reset
