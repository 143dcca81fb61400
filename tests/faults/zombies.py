"""An attempt that is stopped in the middle of something, and wakes up when others have gone on."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.storage.local import Disk

MOMENTS = ("training", "writing a shard file", "committing", "recording the commit", "pruning")


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

    def train(self, steps, inside=lambda: None):
        """So many steps, each on this attempt's own data."""
        for _ in range(steps):
            self.ckpt.boundary()
            inside()
            self.model(torch.randn(3, 2)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.ckpt.boundary()
        self.ckpt._attempt.saver.wait()


class Faint:
    """Stops the whole process, once."""

    def __init__(self):
        self.over = False

    def __call__(self):
        if not self.over:
            self.over = True
            os.kill(os.getpid(), signal.SIGSTOP)


def _faint_on_disk(moment, faint):
    """Let this process faint inside the first system call that belongs to the moment."""
    write, rename, remove = Disk.write, Disk.rename, Disk.remove

    def slow_write(self, path, descriptor, block, first_byte):
        half = len(block) // 2 if path.name.startswith("rank") else 0
        if moment == "writing a shard file" and half:
            write(self, path, descriptor, block[:half], first_byte)
            faint()
            block, first_byte = block[half:], first_byte + half
        write(self, path, descriptor, block, first_byte)

    def slow_rename(self, source, target):
        names = {"committing": "manifest.json", "recording the commit": "1.json"}
        if target.name == names.get(moment):
            faint()
        rename(self, source, target)

    def slow_remove(self, path):
        if moment == "pruning" and path.name == "manifest.json":
            faint()
        remove(self, path)

    Disk.write, Disk.rename, Disk.remove = slow_write, slow_rename, slow_remove


def zombie(place, moment):
    """Train two steps, faint in the third, and train five when awake again; then finish."""
    torch.set_num_threads(1)
    attempt, faint = Attempt(place, seed=0), Faint()
    attempt.train(2)
    if moment == "training":
        attempt.train(5, inside=faint)
    else:
        _faint_on_disk(moment, faint)
        attempt.train(5)
    attempt.ckpt.close()
