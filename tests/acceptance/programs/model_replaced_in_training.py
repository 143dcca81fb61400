"""Replace a layer by a larger one, and the optimizer, at the head of an epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(10, 6)

    def forward(self, i):
        return self.rows(i.clamp(max=self.rows.num_embeddings - 1))


torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 20, (24,)), torch.randn(24, 6))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(data, batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for epoch in ckpt.epochs(3):
        if epoch == 1 and model.rows.num_embeddings == 10:
            model.rows = nn.Embedding(20, 6)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for i, x in ckpt.batches():
            loss = (model(i) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(i, loss)
    log(model)
