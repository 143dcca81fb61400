"""Call `boundary` in a loop over two loaders that are not tracked."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

random.seed(0)
torch.manual_seed(0)
small = DataLoader(TensorDataset(torch.randn(12, 6)), batch_size=4, shuffle=True)
large = DataLoader(TensorDataset(torch.randn(28, 6) + 1), batch_size=4, shuffle=True)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer) as ckpt:
    loaders = [small, large]
    iterators = [iter(loader) for loader in loaders]
    while ckpt.cursor.step < 24 and ckpt.boundary():
        task = random.choices([0, 1], [0.4, 0.6])[0]
        try:
            (x,) = next(iterators[task])
        except StopIteration:
            iterators[task] = iter(loaders[task])
            (x,) = next(iterators[task])
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(task, x, loss)
    log(model)
