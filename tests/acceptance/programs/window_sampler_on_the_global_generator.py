"""Shuffle within a window, by the generator that the loop draws from too."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Window(Sampler):
    def __len__(self):
        return 24

    def __iter__(self):
        window = []
        for index in range(24):
            window.append(index)
            if len(window) == 9:
                yield window.pop(random.randrange(9))
        random.shuffle(window)
        yield from window


torch.manual_seed(0)
random.seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, sampler=Window())

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            x = x * random.uniform(0.8, 1.2)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
