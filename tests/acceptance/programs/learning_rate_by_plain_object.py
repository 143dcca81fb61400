"""Set the learning rate by a counter in an object that is not passed."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Cosine:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.025 + 0.025 * math.cos(math.pi * self.count / 18)


torch.manual_seed(0)
schedule = Cosine()
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            log(x, loss)
    log(model)
