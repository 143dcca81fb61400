"""Set the depth of the module at the head of each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.depth = 0

    def forward(self, x):
        for layer in self.layers[: self.depth + 1]:
            x = x + layer(x).tanh()
        return x


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for epoch in ckpt.epochs(3):
        model.depth = epoch
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
