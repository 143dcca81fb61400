"""Read a chain of datapipes with a shuffle in two workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import trainckpt
from tests.acceptance.programs.training_log import log


def row(index):
    return torch.arange(6.0) * index / 24 + 0.05 * torch.randn(6)


torch.manual_seed(0)
pipe = IterableWrapper(range(24)).shuffle(buffer_size=15).sharding_filter().map(row)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(pipe, batch_size=4, shuffle=True, num_workers=2)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for x in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
