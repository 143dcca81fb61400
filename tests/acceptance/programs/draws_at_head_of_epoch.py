"""Draw a crop size and a mask at the head of each epoch."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
random.seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        size, mask = random.randint(3, 6), torch.rand(6) < 0.7
        for (x,) in ckpt.batches():
            x = x * mask
            x[:, size:] = 0
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
