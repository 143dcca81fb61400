"""Runs that last until somebody stops them, in processes of their own."""

from __future__ import annotations

import contextlib
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import trainckpt
from trainckpt.lifecycle import place
from trainckpt.lifecycle.heartbeat import Heartbeat

ACCUMULATE = 3


@contextlib.contextmanager
def beating(ckpt, rank):
    """What the Checkpointer does by itself once it is wired."""
    own = Heartbeat(place.open_place(ckpt._tier.url), ckpt.attempt)
    if rank == 0:
        own.start()
    try:
        yield
    finally:
        own.stop()


def train(rank, run, steps=10**6, stuck_at=None, **options):
    """Train `steps` steps; hang inside the micro-batch `stuck_at`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"every": "never", "stop_at": "micro-batch", **options}
    with (
        contextlib.ExitStack() as stack,
        trainckpt.Checkpointer(run, model=model, optimizer=optimizer, **options) as ckpt,
    ):
        stack.enter_context(beating(ckpt, rank))
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
