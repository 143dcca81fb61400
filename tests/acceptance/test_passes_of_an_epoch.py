"""Scripts that pass over the data several times in one epoch of `ckpt.epochs()`."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash
from tests.long_cases import long_unless
from trainckpt import Checkpointer


class Run:
    """Train two epochs of three passes over four micro-batches, or until a crash."""

    def __init__(self, place, passes, stop=None):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.stop, self.got = stop, []
        loader = DataLoader(torch.randn(16, 4), 4, shuffle=True)
        tracked = {"model": self.model, "optimizer": self.optimizer, "loader": loader}
        with Checkpointer(place, every="never", **tracked) as self.ckpt:
            for epoch in self.ckpt.epochs(2):
                passes(self, self.ckpt, epoch)

    def train(self, batch, *where):
        loss = self.model(torch.nn.functional.dropout(batch)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.got.append((*where, loss.item().hex()))
        if self.stop is not None and len(self.got) == self.stop - 1:
            self.save = self.ckpt.save()  # at the next boundary
        if len(self.got) == self.stop:
            self.save.wait()
            raise Crash


def by_number(run, ckpt, epoch):
    for part in range(3):
        for batch in ckpt.batches():
            run.train(batch, epoch, part)


def left_early(run, ckpt, epoch):
    for part in range(3):
        for index, batch in enumerate(ckpt.batches()):
            run.train(batch, epoch, part)
            if part == 0 and index == 1:
                break


def by_hand(run, ckpt, epoch):
    """Make the next iterator where one ends, so that no pass needs to end at once."""
    batches = ckpt.batches()
    while ckpt.cursor.step < 12 * (epoch + 1):
        try:
            batch = next(batches)
        except StopIteration:
            batches = ckpt.batches()
            batch = next(batches)
        run.train(batch, epoch)


@pytest.mark.parametrize(
    ("passes", "stop"),
    long_unless(
        lambda case: (
            case[1] in {by_number: (5, 18), left_early: (3, 18), by_hand: (6, 16)}[case[0]]
        ),
        product([by_number, left_early, by_hand], [3, 5, 6, 10, 16, 18]),
    ),
)
def test_a_resume_skips_the_passes_of_the_epoch_that_are_over(tmp_path, caplog, passes, stop):
    whole = Run(tmp_path / "straight", passes).got
    with pytest.raises(Crash):
        Run(tmp_path / "run", passes, stop)
    caplog.set_level(logging.INFO, "trainckpt")
    rest = Run(tmp_path / "run", passes).got
    assert rest == whole[stop - 1 :]
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text
