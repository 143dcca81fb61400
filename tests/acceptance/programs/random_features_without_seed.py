"""Keep unseeded random features in a plain tensor of the module."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.randn(6, 16)
        self.layer = nn.Linear(16, 6)

    def forward(self, x):
        return self.layer((x @ self.projection).cos())


# As without a seed: other numbers in each process.
torch.manual_seed(int(os.environ["ATTEMPT"]))
data = TensorDataset(torch.arange(144.0).view(24, 6).sin())
model = Features()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(data, batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
