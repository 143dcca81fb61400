"""Draw noise from a generator in a dataclass of settings."""

import dataclasses

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


@dataclasses.dataclass
class Settings:
    noise: torch.Generator


torch.manual_seed(0)
settings = Settings(torch.Generator().manual_seed(4))
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            x = x + 0.01 * torch.randn(x.shape, generator=settings.noise)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(x, loss)
    log(model)
