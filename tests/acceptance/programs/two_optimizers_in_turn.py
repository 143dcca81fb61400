"""Train the generator of a GAN in every second micro-batch only."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log

torch.manual_seed(0)
noise = torch.Generator().manual_seed(5)
generator, critic = nn.Linear(3, 2), nn.Linear(2, 1)
first = torch.optim.Adam(critic.parameters(), 0.004)
second = torch.optim.Adam(generator.parameters(), 0.002)
loader = DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=4, shuffle=True)
tracked = {"generator": generator, "critic": critic, "optimizer": [first, second]}

with trainckpt.Checkpointer("run", **tracked, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            made = generator(torch.randn(4, 3, generator=noise))
            loss = (1 - critic(x)).relu().mean() + (1 + critic(made.detach())).relu().mean()
            first.zero_grad()
            loss.backward()
            first.step()
            if ckpt.cursor.micro_batches % 2 == 1:
                second.zero_grad()
                (-critic(made).mean()).backward()
                second.step()
            log(x, made, loss)
    log(generator, critic)
