"""Runs that last until somebody stops them, in processes of their own."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

import trainckpt

ACCUMULATE = 3


def train(rank, run, steps=10**6, stuck_at=None, **options):
    """Train `steps` steps; hang inside the micro-batch `stuck_at`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"every": "never", "stop_at": "micro-batch", **options}
    with trainckpt.Checkpointer(run, model=model, optimizer=optimizer, **options) as ckpt:
        while ckpt.cursor.step < steps:
            ckpt.boundary()
            if ckpt.cursor.micro_batches == stuck_at:
                time.sleep(3600)
            time.sleep(0.005)
            model(torch.rand(2, 8)).square().mean().backward()
            if ckpt.cursor.micro == ACCUMULATE - 1:
                optimizer.step()
                optimizer.zero_grad()
        return ckpt.cursor.micro_batches
