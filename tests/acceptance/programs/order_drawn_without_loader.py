"""Draw the order at the head of each epoch, with no loader."""

import torch
from torch import nn

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
rows = torch.randn(24, 6)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer) as ckpt:
    for _ in ckpt.epochs(3):
        order = torch.randperm(24)
        for at in range(4 * ckpt.cursor.batches, 24, 4):
            if not ckpt.boundary():
                break
            x = rows[order[at : at + 4]]
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
