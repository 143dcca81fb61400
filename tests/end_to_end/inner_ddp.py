"""A program of real ranks whose DDP is not the outermost wrapper."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer

ACCUMULATE = 4


class Left(Exception):
    """The attempt ends here."""


class Box(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


WRAPS = {"compiled": lambda inner: torch.compile(inner, backend="eager"), "deeper": Box}


def train(rank, place, wrap, until, save_at=None):
    """So many micro-batches, under no_sync but for each window's last; digests of each."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    ddp = DistributedDataParallel(inner)
    model = WRAPS[wrap](ddp)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    torch.manual_seed(rank + 1)
    seen = {}
    with (
        contextlib.suppress(Left),
        Checkpointer(
            place, model=model, optimizer=optimizer, every="never", accumulate=ACCUMULATE
        ) as ckpt,
    ):
        while True:
            pending = ckpt.save() if ckpt.cursor.micro_batches + 1 == save_at else None
            ckpt.boundary()
            number = ckpt.cursor.micro_batches
            if pending is not None:
                pending.wait("local", 30.0)
            if number == until:
                raise Left
            last = number % ACCUMULATE == ACCUMULATE - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = model(torch.rand(3, 4)).square().mean()
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            seen[number] = loss.item().hex(), [t.tolist() for t in inner.state_dict().values()]
    resumed = ckpt.resumed_from
    return seen, resumed and resumed.micro_batches
