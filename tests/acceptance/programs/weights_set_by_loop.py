"""Mine hard examples: the loop writes the losses to the sampler's weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Hard(Sampler):
    def __init__(self):
        self.weights = torch.ones(24)

    def __len__(self):
        return 24

    def __iter__(self):
        yield from torch.multinomial(self.weights, 24, replacement=True).tolist()


torch.manual_seed(0)
sampler = Hard()
data = TensorDataset(torch.arange(24), torch.randn(24, 6))
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(data, batch_size=4, sampler=sampler)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for i, x in ckpt.batches():
            each = (model(x) - x).square().mean(1)
            sampler.weights[i] = each.detach() + 0.01
            loss = each.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(i, loss)
    log(model)
