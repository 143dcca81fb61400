"""Training with a snapshot before each micro-batch: is each the state of its boundary?"""

from __future__ import annotations

import os

import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.attempt.launch import AT_VARIABLE

WORDS, WIDTH = 300, 64  # 75 kB: large enough to be copied beside training


class Model(nn.Module):
    def __init__(self, max_norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=max_norm)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.out(self.words(ids))


class Loop:
    """Four micro-batches, two a step, and a snapshot asked for before each."""

    def __init__(self, place, model, optimizers, between=lambda: None, **options):
        self.model, self.optimizers, self.between = model, optimizers, between
        self.device = next(model.parameters()).device
        self.saves, self.states = [], []
        options = {"every": "never", "keep_last": 99, **options}
        with Checkpointer(place, model=model, optimizer=optimizers, **options) as ckpt:
            self.resumed_from = ckpt.resumed_from
            for number in range(8):
                self.saves.append(ckpt.save())
                ckpt.boundary()
                self.states.append([t.clone() for t in self.tensors()])
                self.train(number)

    def tensors(self):
        moments = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *moments]

    def train(self, number):
        ids = torch.arange(number, number + 40, device=self.device)
        loss = nn.functional.cross_entropy(self.model(ids), ids)
        self.between()
        loss.backward()
        if number % 2:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


def adam(model):
    return [torch.optim.Adam(model.parameters(), 0.1)]


def restored(place, save, make, device):
    """Model and optimizer tensors of one snapshot, put into fresh objects."""
    model = Model().to(device)
    optimizers = make(model)
    os.environ[AT_VARIABLE] = save.snapshot
    try:
        ckpt = Checkpointer(place, model=model, optimizer=optimizers, every="never")
        ckpt.resume()
        ckpt.boundary()
        found = [v for o in optimizers for s in o.state.values() for v in s.values()]
        found = [*model.state_dict().values(), *found]
        ckpt._attempt.shutdown.abandon(None, ckpt.cursor)
    finally:
        del os.environ[AT_VARIABLE]
    return found


def as_saved(place, loop, make=adam):
    """Every snapshot that was committed is the state of its boundary, bit for bit."""
    good = 0
    for save, state in zip(loop.saves, loop.states, strict=True):
        if save.error is None:
            found = restored(place, save, make, loop.device)
            assert len(found) == len(state)
            assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True))
            good += 1
    return good
