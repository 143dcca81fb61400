"""Small models, and the step of any optimizer on them, to compare state and losses bit for bit."""

from __future__ import annotations

import torch
from torch import nn

from tests.state.helpers import frozen


class Net(nn.Module):
    """A convolution, and a linear layer."""

    def __init__(self, dtype=torch.float32, memory_format=torch.contiguous_format):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        self.head = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, number):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        return self.head(self.conv(x.to(self.head.weight.dtype)).mean((2, 3)))


class Words(nn.Module):
    """An embedding with sparse gradients; a batch has three of its eight rows."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 3, sparse=True)

    def forward(self, number):
        return self.words(torch.tensor([number % 8, (number + 1) % 8, number * 3 % 8]))


def step(model, optimizer, number):
    """Train on batch `number`; the loss, to the bit."""

    def closure():
        optimizer.zero_grad()
        loss = model(number).float().square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure).item().hex()
    loss = closure()
    optimizer.step()
    return loss.item().hex()


def state_of(model, optimizer):
    """Weights, gradients, groups and the state of each parameter, by its name."""
    named = {id(p): name for name, p in model.named_parameters()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {named.get(id(key), key): value for key, value in optimizer.state.items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return frozen([dict(model.state_dict()), groups, state, grads])
