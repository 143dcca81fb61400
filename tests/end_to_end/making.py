"""A model whose forward makes a buffer; a program of real DDP ranks that trains it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer


class Scale(nn.Module):
    """Keeps what it drew for its first batch, or for the first that is as large."""

    def __init__(self, first=None, registers=True):
        super().__init__()
        if registers:
            self.register_buffer("drawn", first, persistent=False)

    def forward(self, x):
        drawn = getattr(self, "drawn", None)
        if drawn is None or len(drawn) < len(x):
            self.register_buffer("drawn", torch.rand(len(x), dtype=torch.float64), persistent=False)
        return x * self.drawn[: len(x), None].to(x.dtype)


def train(rank, place, until):
    """Steps up to `until`, each with a batch that is larger by one row; the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(Scale(torch.zeros(1)), nn.Linear(4, 4), Scale())
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(rank + 1)
    losses = {}
    with Checkpointer(place, model=wrapped, optimizer=optimizer, every="1 steps") as ckpt:
        while (step := ckpt.cursor.step) < until:
            ckpt.boundary()
            loss = wrapped(torch.rand(step % 3 + 2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item().hex()
        resumed = ckpt.resumed_from
    return losses, resumed and resumed.step
