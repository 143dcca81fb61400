"""Set an attribute of the dataset that persistent workers never see."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Rows(Dataset):
    epoch = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(1000 * self.epoch + index)
        return torch.randn(6, generator=noise)


torch.manual_seed(0)
rows = Rows()
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for epoch in ckpt.epochs(3):
        rows.epoch = epoch
        for x in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
