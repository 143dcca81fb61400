"""Make a generator at the first sample, in two workers."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import trainckpt
from tests.acceptance.programs.training_log import log


class Rows(Dataset):
    rng = None

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(get_worker_info().id)
        return torch.arange(6.0) * index / 24 + torch.from_numpy(self.rng.normal(size=6)).float()


torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for x in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
