"""Let the loop enlarge the batches within an epoch; Attributes tracks their size."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Growing:
    def __init__(self):
        self.size = 2

    def __iter__(self):
        order = torch.randperm(48).tolist()
        while order:
            size = self.size
            yield order[:size]
            del order[:size]


torch.manual_seed(0)
batches = Growing()
size = trainckpt.Attributes(batches, "size")
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(48, 6)), batch_sampler=batches)

with trainckpt.Checkpointer(
    "run", model=model, optimizer=optimizer, loader=loader, size=size
) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if ckpt.cursor.step % 7 == 6:
                batches.size += 1
            log(x, loss)
    log(model)
