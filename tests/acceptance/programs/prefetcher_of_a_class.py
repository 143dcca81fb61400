"""Ask for the next batch before the current one is trained, as apex's prefetcher does."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Ahead:
    def __init__(self, batches):
        self.batches = iter(batches)
        self.following = next(self.batches, None)

    def __iter__(self):
        return self

    def __next__(self):
        if (current := self.following) is None:
            raise StopIteration
        self.following = next(self.batches, None)
        return current


torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in Ahead(ckpt.batches()):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
