"""Random numbers that a script draws before it asks for each batch are named; others are not."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer
from trainckpt.state.script_randomness import REASON


def before_each(ckpt, loaders, train):
    iterators = [iter(loader) for loader in loaders]
    for _ in range(6):
        train(next(iterators[random.randrange(2)]))


def once_at_the_beginning(ckpt, loaders, train):
    batches = iter(loaders[0])
    random.random()
    for _ in range(6):
        train(next(batches))


def after_each_step(ckpt, loaders, train):
    for batch, _ in zip(*loaders, strict=True):
        train(batch)
        random.random()


def after_the_boundary(ckpt, loaders, train):
    iterators = [iter(loader) for loader in loaders]
    for _ in range(ckpt.cursor.micro_batches, 6):
        ckpt.boundary()
        train(next(iterators[random.randrange(2)]))


def before_the_boundary(ckpt, loaders, train):
    iterators = [iter(loader) for loader in loaders]
    for _ in range(6):
        which = random.randrange(2)
        ckpt.boundary()
        train(next(iterators[which]))


def in_the_epoch_s_head(ckpt, loaders, train):
    for _ in ckpt.epochs(1):
        batches = ckpt.batches()
        random.random()
        for batch in batches:
            train(batch)


def run(place, loop, stop=None):
    torch.manual_seed(0)
    random.seed(0)
    model, data = torch.nn.Linear(4, 1), torch.randn(48, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loaders = [DataLoader(data, 4, shuffle=True), DataLoader(data, 4, shuffle=True)]
    trained = []

    def train(batch):
        model(torch.nn.functional.dropout(batch)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(batch.tolist())
        if len(trained) == stop:
            raise Crash

    with Checkpointer(
        place, every="1 steps", model=model, optimizer=optimizer, loader=loaders
    ) as ckpt:
        loop(ckpt, [ckpt.loader(loader) for loader in loaders], train)
    return trained


@pytest.mark.parametrize("loop", [before_each, before_the_boundary])
def test_draws_before_each_batch_are_named_once(tmp_path, caplog, loop):
    run(tmp_path, loop)
    assert caplog.text.count(REASON) == 1


@pytest.mark.parametrize("loop", [once_at_the_beginning, after_each_step, in_the_epoch_s_head])
def test_draws_at_other_places_are_not_named(tmp_path, caplog, loop):
    run(tmp_path, loop)
    assert REASON not in caplog.text


def test_draws_after_the_boundary_of_a_script_go_on_exactly_and_are_not_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = run(tmp_path / "straight", after_the_boundary)
    with pytest.raises(Crash):
        run(tmp_path / "run", after_the_boundary, stop=3)
    assert run(tmp_path / "run", after_the_boundary) == straight[2:]
    assert "this resume is bitwise" in caplog.text
    assert REASON not in caplog.text


def test_a_resume_of_such_a_script_is_not_bitwise(tmp_path, caplog):
    with pytest.raises(Crash):
        run(tmp_path, before_each, stop=3)
    caplog.clear()
    caplog.set_level(logging.INFO, "trainckpt")
    run(tmp_path, before_each)
    assert "this resume is same data, not bitwise: random numbers" in caplog.text
