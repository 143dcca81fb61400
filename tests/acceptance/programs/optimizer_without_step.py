"""Train with a SAM whose own `step` is never called."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class SAM(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moved"] = p.grad * group["rho"]
                p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["moved"])
        self.base.step()
        self.zero_grad()


torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = SAM(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for _ in ckpt.epochs(3):
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.first_step()
            (model(x) - x).square().mean().backward()
            optimizer.second_step()
            log(x, loss)
    log(model)
