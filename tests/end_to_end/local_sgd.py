"""A program of real ranks that train by themselves, and average their weights now and then."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from trainckpt import Checkpointer
from trainckpt.state.adapters.optimizer import OptimizerState
from trainckpt.state.captured import Saved


def train(rank, place, until, inner_too=False):
    """Steps up to `until`, averaged after each fourth; the losses of each, and the Checkpointer's
    reasons for anything inexact."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=4, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    tracked = [inner, optimizer] if inner_too else optimizer
    torch.manual_seed(rank + 1)
    losses = {}
    with Checkpointer(place, model=model, optimizer=tracked, every="never", accumulate=1) as ckpt:
        for number in range(ckpt.cursor.micro_batches, until):
            ckpt.boundary()
            loss = model(torch.rand(2, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number] = loss.item().hex()
    return losses, [problem.reason for problem in ckpt._problems]


def lost(rank):
    """What is said of a snapshot without the averager's step, and of one with it."""
    inner = torch.optim.SGD(nn.Linear(3, 1).parameters(), 0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=0))
    state = OptimizerState("optimizer", optimizer)
    found = [
        state.restored(Saved({}, {"optimizer": {"groups": [], "state": {}, **more}}))
        for more in ({}, {"number": 3})
    ]
    return [[part.reason for part in parts] for parts in found]
