"""A zombie: an attempt that goes on, and commits, after a newer one has begun."""

from __future__ import annotations

import torch
from torch import nn

from tests.lifecycle.training import catalog, record
from trainckpt import Checkpointer
from trainckpt.snapshot.catalog import ABANDONED


class Attempt:
    """One attempt with a step at a time, each saved."""

    def __init__(self, place, seed):
        torch.manual_seed(seed)
        self.model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.ckpt = Checkpointer(
            place, model=self.model, optimizer=optimizer, every="1 steps", keep_last=2
        )
        self.optimizer = optimizer
        self.ckpt.resume()

    def train(self, steps):
        """So many steps, each on this attempt's own data."""
        for _ in range(steps):
            self.ckpt.boundary()
            self.model(torch.randn(3, 2)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.ckpt.boundary()
        self.ckpt._attempt.saver.wait()


def test_what_a_zombie_commits_is_an_abandoned_branch_that_nobody_resumes_from(tmp_path):
    zombie = Attempt(tmp_path, seed=0)
    zombie.train(2)
    newer = Attempt(tmp_path, seed=1)
    assert newer.ckpt.resumed_from.step == 2
    newer.train(1)
    zombie.train(5)  # farther than the newer one will ever get
    branches = {str(c.name): c.reason for c in catalog(tmp_path)}
    assert branches["s7~1.7"] == ABANDONED
    assert branches["s3~2.1"] == ""
    newer.train(1)
    newer.ckpt.close()
    zombie.ckpt.close()
    third = Attempt(tmp_path, seed=2)
    assert third.ckpt.resumed_from.step == 4
    assert record(tmp_path, 3)["parent"].split("~")[1].startswith("2.")
    assert torch.equal(third.model.weight, newer.model.weight)
    assert not torch.equal(third.model.weight, zombie.model.weight)
    third.ckpt.close()


def test_a_zombie_deletes_nothing_of_the_newer_attempt(tmp_path):
    zombie = Attempt(tmp_path, seed=0)
    zombie.train(2)
    newer = Attempt(tmp_path, seed=1)
    newer.train(1)
    held = {str(c.name) for c in catalog(tmp_path) if c.usable}
    zombie.train(4)  # more than keep_last
    assert held <= {str(c.name) for c in catalog(tmp_path) if c.usable}
    newer.ckpt.close()
    zombie.ckpt.close()
