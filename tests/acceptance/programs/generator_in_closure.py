"""Draw a scale from a generator in the closure of a function."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


def make_scale():
    rng = np.random.default_rng(12)

    def scale():
        return 1 + 0.01 * float(rng.normal())

    return scale


torch.manual_seed(0)
scale = make_scale()
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            x = x * scale()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
