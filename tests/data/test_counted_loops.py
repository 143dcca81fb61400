"""Loops that count the batches of a resumed pass from 0, or repeat batches, are found."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer
from trainckpt.data.counted_loops import CYCLED, CountedWindows, counter_of
from trainckpt.format.cursor import Cursor


class Batches:
    """An iterator that looks for the loop around it at its first batch."""

    def __init__(self):
        self.found = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.found is None:
            self.found = counter_of(self, 3)
        return 0


def passed_on(batches):
    yield from batches


@pytest.mark.parametrize(
    ("around", "counter"),
    [
        (enumerate, "enumerate"),
        (lambda batches: enumerate(passed_on(batches)), "enumerate"),
        (lambda batches: zip(range(9), batches, strict=False), "zip"),
        (lambda batches: enumerate(batches, 1), "enumerate"),
        (lambda batches: enumerate(batches, 3), ""),
        (lambda batches: zip(batches, batches, strict=False), ""),
        (iter, ""),
    ],
    ids=[
        "enumerate",
        "over a generator",
        "zip",
        "from 1",
        "from another number",
        "of batches",
        "plain",
    ],
)
def test_the_counter_around_an_iterator_is_found(around, counter):
    batches, other = Batches(), enumerate([1, 2])
    next(around(batches))
    assert batches.found == counter
    assert next(other) == (0, 1)


def repeated(loader):
    while True:
        yield from loader


def train(place, repeat, stop=None):
    """Train on batches of one loader, each with one of a smaller loader; return both."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    large, small = (DataLoader(torch.arange(n)[:, None] / 32, 4, shuffle=True) for n in (32, 12))
    trained = []
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=[large, small], every="1 steps"
    ) as ckpt:
        for one, other in zip(ckpt.batches(), repeat(ckpt.loader(small)), strict=False):
            model(one + other).sum().backward()
            optimizer.step()
            trained.append((one.tolist(), other.tolist()))
            if len(trained) == stop:
                raise Crash
    return trained


@pytest.mark.parametrize("repeat", [itertools.cycle, repeated])
def test_a_loader_that_a_cycle_repeats_is_named_at_a_resume(tmp_path, caplog, repeat):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = train(tmp_path / "straight", repeat)
    with pytest.raises(Crash):
        train(tmp_path / "run", repeat, stop=6)
    is_exact = train(tmp_path / "run", repeat) == straight[5:]
    assert is_exact == (repeat is repeated)
    assert (f"not exact: {CYCLED}" in caplog.messages) != is_exact
    assert ("this resume is bitwise" in caplog.text) == is_exact


def accumulate(place, ends_window, stop=None):
    """Train windows of four micro-batches; return the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader, losses, save = DataLoader(torch.arange(40)[:, None] / 40, 2), [], None
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="never"
    ) as ckpt:
        for number, batch in enumerate(ckpt.batches(), 1):
            if save is not None:
                save.wait()
                raise Crash
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            if len(losses) == stop:
                save = ckpt.save()  # at the next boundary
            if ends_window(number, ckpt):
                optimizer.step()
                optimizer.zero_grad()
    return losses


def by_number(number, ckpt):
    return number % 4 == 0


def by_cursor(number, ckpt):
    return ckpt.cursor.micro == 3


@pytest.mark.parametrize(
    ("ends_window", "stop", "is_exact"),
    [(by_number, 6, False), (by_number, 3, False), (by_number, 8, True), (by_cursor, 6, True)],
)
def test_a_window_that_a_count_from_0_makes_longer_is_named(
    tmp_path, caplog, ends_window, stop, is_exact
):
    straight = accumulate(tmp_path / "straight", ends_window)
    with pytest.raises(Crash):
        accumulate(tmp_path / "run", ends_window, stop)
    assert (accumulate(tmp_path / "run", ends_window) == straight[stop:]) == is_exact
    named = f"the first window after the resume had {4 + stop % 4} micro-batches, more than others"
    assert (named in caplog.text) != is_exact


@pytest.mark.parametrize(
    ("steps", "before", "sizes", "is_named"),
    [
        (2, 8, [6, 4], True),
        (2, 8, [7, 5], True),  # the next one holds what an epoch left over
        (2, 8, [4, 2], False),
        (2, 8, [8, 8], False),  # windows grow from here on
        (0, 0, [6, 4, 4], True),
        (0, 0, [6, 4, 3], False),
    ],
)
def test_a_first_window_is_too_long_beside_those_before_and_after_it(
    steps, before, sizes, is_named
):
    told = []
    windows = CountedWindows(Cursor(step=steps, micro_batches=before), 1, told.append)
    for number, size in enumerate(sizes, steps + 1):
        windows.reach_boundary(number, size)
        windows.reach_boundary(number, size)  # an evaluation begins
    assert windows.is_over
    assert bool(told) == is_named


@pytest.mark.parametrize(("micro", "sizes", "is_named"), [(2, [6, 6], True), (1, [4, 6], False)])
def test_a_window_that_is_longer_by_what_it_had_before_the_resume_is_named(micro, sizes, is_named):
    """The one after it is as long, where it goes over the end of the epoch."""
    told = []
    windows = CountedWindows(Cursor(step=4, micro_batches=16), micro, told.append)
    for number, size in enumerate(sizes, 5):
        windows.reach_boundary(number, size)
    assert bool(told) == is_named
