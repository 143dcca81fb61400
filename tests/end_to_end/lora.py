"""A LoRA-style training: 1 % of the parameters is trained, beside a frozen base."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainckpt import Checkpointer
from trainckpt.storage.local import Disk

WIDTH, LAYERS, RANK = 768, 4, 4


class Adapted(nn.Module):
    """A frozen matrix, and two small ones that are trained."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x).tanh() + self.up(self.down(x))


def parts(rank=0, world=1, optimizer=torch.optim.SGD):
    """What a script builds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(LAYERS)])
    wrapped = DistributedDataParallel(model) if world > 1 else model
    trained = [p for p in model.parameters() if p.requires_grad]
    data = TensorDataset(torch.randn(32, WIDTH))
    sampler = DistributedSampler(data, world, rank) if world > 1 else None
    loader = DataLoader(data, 2, sampler=sampler)
    return {"model": wrapped, "optimizer": optimizer(trained, 0.01), "loader": loader}


def train(rank, place, world, until, act=None, inside=(), optimizer=torch.optim.SGD, **options):
    """Windows of two micro-batches, up to step `until`; losses by place.

    Args:
        inside: Steps in whose window a save is asked for at its middle.
        act: Called with (step, model) before a window.
    """
    tracked, losses = parts(rank, world, optimizer), {}
    model, options = tracked["model"], {"every": "1 steps", "keep_last": 99, **options}
    with Checkpointer(place, **tracked, **options) as ckpt:
        for _ in ckpt.epochs(99):
            for (x,) in ckpt.batches():
                at = ckpt.cursor
                ckpt._attempt.saver.wait()  # else a save is skipped where disks are slow
                if act is not None and not at.micro:
                    act(at.step, model)
                model(x + torch.rand(1)).square().mean().backward()
                losses[f"{at.step}.{at.micro}"] = float(
                    sum(p.detach().double().sum() for p in model.parameters())
                ).hex()
                if at.micro:
                    tracked["optimizer"].step()
                    tracked["optimizer"].zero_grad()
                elif at.step in inside:
                    ckpt.save()
                    while not ckpt._gate.has_open_round():
                        time.sleep(0.001)
                if ckpt.cursor.step == until:
                    return losses
    return losses


def train_in_tiers(rank, place, world, until, tiers):
    """As `train`, with slower tiers."""
    return train(rank, place, world, until, tiers=tiers)


def all_ways(rank, folder, world, options=None):
    """Without a stop; and stopped after two steps, with saves inside windows. Losses of both."""
    straight = train(rank, folder / "straight", world, 4, every="never")
    how = options or {}
    first = train(rank, folder / "run", world, 2, inside=(0, 1), **how)
    return straight, {**first, **train(rank, folder / "run", world, 4, inside=(3,), **how)}


def killed(rank, place, world, until, at):
    """As `train`, but killed at the `at`-th removal of anything in a snapshot's folder."""
    count = 0

    def dying(original):
        def remove(disk, path):
            nonlocal count
            count += "snapshots" in path.parts and not path.name.startswith(".tmp-")
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            original(disk, path)

        return remove

    Disk.remove, Disk.remove_folder = dying(Disk.remove), dying(Disk.remove_folder)
    return train(rank, place, world, until, keep_last=1)
