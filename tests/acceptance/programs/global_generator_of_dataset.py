"""Draw from a generator of the script in a dataset's transform, in two workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Rows(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(torch.arange(6.0) * index / 24)


torch.manual_seed(0)
noise = torch.Generator().manual_seed(5)
rows = Rows(lambda row: row * torch.rand(1, generator=noise))
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=2)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for x in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
