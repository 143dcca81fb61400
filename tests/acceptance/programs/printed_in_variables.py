"""Keep meters, clocks and settings in variables that no number trained depends on."""

import argparse
import copy
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1


torch.manual_seed(0)
args = argparse.Namespace(rate=0.01, name=f"attempt {os.environ['ATTEMPT']}")
model = nn.Linear(6, 6)
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), args.rate)
loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)
(x,) = next(iter(loader))
torch.manual_seed(1)
meter, begun, best = AverageMeter(), time.time(), float("inf")

with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
    for epoch in ckpt.epochs(3):
        at = time.perf_counter()
        for (x,) in ckpt.batches():
            loss = (model(x) - x).square().mean() + (model(x) - reference(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.update(loss.item())
            best = min(best, loss.item())
            print(args.name, epoch, meter.sum / meter.count, best, time.perf_counter() - at)
            at = time.perf_counter()
            log(x, loss)
    log(model)
    print(time.time() - begun)
