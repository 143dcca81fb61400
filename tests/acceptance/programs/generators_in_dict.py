"""Draw gradient noise from generators in a dict of the script."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
rngs = {"noise": np.random.RandomState(3), "drop": [random.Random(4)]}
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            x = x * (1 + 0.1 * float(rngs["noise"].normal()) * rngs["drop"][0].random())
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
