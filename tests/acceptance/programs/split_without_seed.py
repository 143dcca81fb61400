"""Split the data at random in a script that sets no seed."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainckpt
from tests.acceptance.programs.training_log import log

# As without a seed: other numbers in each process.
torch.manual_seed(int(os.environ["ATTEMPT"]))
data = TensorDataset(torch.arange(192.0).view(32, 6).sin())
training, validation = random_split(data, [24, 8])
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(training, batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
