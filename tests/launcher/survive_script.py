"""Two ranks that save nothing by themselves; one kills itself after some steps, the other hangs.

torchrun ... survive_script.py PLACE
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer

DIES_AT = 20


def main(place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"every": "never", "survivors": "6 s", "redundancy": "partner"}
    with Checkpointer(place, model=model, optimizer=optimizer, **options) as ckpt:
        while ckpt.boundary():
            if ckpt.cursor.step == DIES_AT and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if ckpt.cursor.step == DIES_AT:
                time.sleep(3600)
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
