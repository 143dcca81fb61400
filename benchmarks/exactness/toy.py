"""What the toy jobs of Accelerate and Transformers have in common."""

from __future__ import annotations

import logging
import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

logging.getLogger("trainckpt").setLevel(logging.WARNING)


class Augmented(Dataset):
    """Fixed vectors, and noise from every generator of the process that loads them."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        fixed = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = random.random() + float(np.random.rand())
        return fixed + 0.1 * torch.randn(8) + 0.1 * noise, index


def net():
    """BatchNorm, dropout, and enough layers for DDP to put them in an order of its own."""
    wide = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), *wide, nn.Dropout(0.2), nn.Linear(64, 1)
    )


def strike(ckpt, *, here):
    """SIGTERM to this process if `here`; all ranks wait until they have heard of it."""
    if here:
        os.kill(os.getpid(), signal.SIGTERM)
    while not ckpt._gate.has_open_round():
        time.sleep(0.001)
