"""An optimizer that trains and is not tracked is said: no save holds what it trains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainckpt import Checkpointer


def train(place, one_micro_batch, make=torch.optim.Adam, micro_batches=24):
    """Train a tracked model; each micro-batch by a function of number, model and optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    data = DataLoader(torch.randn(micro_batches, 2))
    with Checkpointer(place, model=model, optimizer=optimizer, loader=data) as ckpt:
        for x in ckpt.batches():
            model, optimizer = one_micro_batch(ckpt.cursor.micro_batches, model, optimizer)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_made_anew_is_said_in_its_second_micro_batch(tmp_path, caplog):
    said = []

    def anew(number, model, optimizer):
        said.append("not tracked" in caplog.text)
        if number == 3:
            optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer

    train(tmp_path, anew)
    assert said.index(True) == 5
    assert caplog.text.count("not tracked") == 1
    assert "steps model/bias and model/weight" in caplog.text.replace(", ", " and ")


def test_a_model_made_anew_is_said(tmp_path, caplog):
    def anew(number, model, optimizer):
        if number == 3:
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer

    train(tmp_path, anew)
    assert caplog.text.count("no tracked optimizer does") == 1


@pytest.mark.parametrize("kind", ["a probe in an evaluation", "clones of the model", "no state"])
def test_optimizers_that_train_something_else_are_not_said(tmp_path, caplog, kind):
    def beside(number, model, optimizer):
        if kind == "a probe in an evaluation" and number == 3:
            probe = nn.Linear(2, 1)
            other, steps = torch.optim.Adam(probe.parameters()), 30
        elif kind == "clones of the model":
            probe = copy.deepcopy(model)
            other, steps = torch.optim.Adam(probe.parameters()), 2
        else:
            probe = model
            other, steps = torch.optim.SGD(model.parameters(), lr=0.1), 1
        for _ in range(steps):
            probe(torch.ones(1, 2)).sum().backward()
            other.step()
            other.zero_grad()
        return model, optimizer

    train(tmp_path, beside)
    assert "not tracked" not in caplog.text


def test_optimizers_inside_a_tracked_one_are_not_said(tmp_path, caplog):
    class Outer(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.base = torch.optim.Adam(self.param_groups)
            self.state = self.base.state

        def step(self):
            self.base.step()

    train(tmp_path, lambda number, *parts: parts, make=Outer)
    assert "not tracked" not in caplog.text
