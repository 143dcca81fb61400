"""Find the end of an accumulation window by `enumerate`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for i, (x,) in enumerate(ckpt.batches()):
            loss = (model(x) - x).square().mean()
            (loss / 4).backward()
            log(x, loss)
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    log(model)
