"""Give the samples labels by the model of the epoch before, in a tensor of the dataset."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Labelled(Dataset):
    def __init__(self, samples):
        self.samples, self.labels = samples, torch.zeros(len(samples))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index], self.labels[index]


torch.manual_seed(0)
dataset = Labelled(torch.randn(24, 6))
model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(dataset, batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for x, y in ckpt.batches():
            loss = (model(x)[:, 0] - y - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, y, loss)
        with torch.no_grad():
            dataset.labels = model(dataset.samples)[:, 0].sign()
    log(model)
