"""A run that goes on until it is stopped: `python metered.py RUN OPTION=VALUE...`."""

from __future__ import annotations

import sys
import time

import torch

import trainckpt


def main(run: str, *options: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    given = dict(each.split("=", 1) for each in options)
    with trainckpt.Checkpointer(run, model=model, optimizer=optimizer, **given) as ckpt:
        while True:
            ckpt.boundary()
            time.sleep(0.02)
            model(torch.rand(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


main(*sys.argv[1:])
