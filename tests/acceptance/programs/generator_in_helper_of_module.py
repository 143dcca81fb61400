"""Draw from a generator of a plain object in a dict of the module."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Jitter:
    def __init__(self):
        self.rng = random.Random(3)

    def __call__(self, x):
        return x * (1 + 0.1 * self.rng.gauss(0, 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.jitter = {"in": Jitter()}

    def forward(self, x):
        return self.layer(self.jitter["in"](x))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
