"""Count the passes in a sampler, which seeds its order by the count."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Rounds(Sampler):
    def __init__(self):
        self.rounds = 0

    def __len__(self):
        return 24

    def __iter__(self):
        order = torch.Generator().manual_seed(9 + self.rounds)
        self.rounds += 1
        return iter(torch.randperm(24, generator=order).tolist())


torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, sampler=Rounds())

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
