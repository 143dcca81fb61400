"""Follow a curriculum: the loop extends the sampler's indices for the next epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
sampler = SubsetRandomSampler(list(range(12)))
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=2, sampler=sampler)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(sampler.indices) < 24:
                sampler.indices = list(range(len(sampler.indices) + 1))
            log(x, loss)
    log(model)
