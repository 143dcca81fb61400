"""Track the generator of an environment as one of its attributes."""

import numpy as np
import torch
from torch import nn

import trainckpt
from tests.acceptance.programs.training_log import log


class Environment:
    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.state = torch.zeros(6)

    def step(self):
        self.state = 0.9 * self.state + torch.from_numpy(self.rng.normal(size=6)).float()
        return self.state


torch.manual_seed(0)
environment = Environment()
tracked = trainckpt.Attributes(environment, "state", "rng")
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), 0.01)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, env=tracked) as ckpt:
    while ckpt.cursor.micro_batches < 18 and ckpt.boundary():
        x = environment.step()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(x, loss)
    log(model)
