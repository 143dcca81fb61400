"""A script for torchrun with a number of agents that changes: elastic.py PLACE TRACE SAMPLES."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainckpt

PACE_S = 0.05  # a micro-batch, so that agents have time to come and go


def main(place: str, trace: str, samples: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    data = torch.arange(float(samples))[:, None]
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, seed=1))
    with trainckpt.Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="4 steps"
    ) as ckpt:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        start = {"world": world, "restarts": restarts, "step": ckpt.cursor.step}
        with (Path(trace) / f"{ckpt.attempt}.{rank}").open("a") as file:
            print(json.dumps(start), file=file, flush=True)
            for _ in ckpt.epochs(1):
                for x in ckpt.batches():
                    step = ckpt.cursor.step
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    print(json.dumps([step, int(x)]), file=file, flush=True)
                    time.sleep(PACE_S)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
