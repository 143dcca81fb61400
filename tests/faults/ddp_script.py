"""A training script of several ranks: tests.faults.ddp_script PLACE STEPS MARKS SLOW_S.

It leaves a file MARKS/<rank>-<step> at each step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer


def main(place, steps, marks, slow_s):
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(place, model=model, optimizer=optimizer, every="2 steps") as ckpt:
        began = ckpt.resumed_from.step if ckpt.resumed_from else 0
        while ckpt.cursor.step < steps and ckpt.boundary():
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (Path(marks) / f"{rank}-{ckpt.cursor.step}").touch()
            time.sleep(slow_s)
    print(f"rank {rank} trained from {began} to {ckpt.cursor.step}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
