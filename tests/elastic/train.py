"""A script for torchrun with a number of agents that changes: train.py RUN TRACE EPOCHS SAMPLES.

Each rank of each attempt writes TRACE/<attempt>.<rank>: a line where it begins, and one for each
micro-batch after its step. While there is a file TRACE/slowly, it trains slowly; while there is
TRACE/waits, it does not get to its Checkpointer, and says so in TRACE/waiting-<pid>.
"""

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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainckpt

PACE_S, SLOW_PACE_S = 0.05, 0.5  # a micro-batch, so that agents have time to come and go
WAIT_S = 0.05
NOBODY_CAME_S = 20.0  # a rank that waits so long for another fails, and is started again


class Numbers(Dataset):
    """Samples that show their number, with noise from the generator of whoever loads them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.full([4], number / self._samples) + 0.1 * torch.randn(4)


def main(place: str, trace: str, epochs: int, samples: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=NOBODY_CAME_S))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)
    network = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = Numbers(samples)
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, seed=1))
    if (waits := Path(trace, "waits")).exists():
        Path(trace, f"waiting-{os.getpid()}").touch()
        while waits.exists():
            time.sleep(WAIT_S)
    with trainckpt.Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="4 steps"
    ) as ckpt:
        begins = {
            "world": world,
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "step": ckpt.cursor.step,
        }
        with (Path(trace) / f"{ckpt.attempt}.{rank}").open("a") as file:
            print(json.dumps(begins), file=file, flush=True)
            for epoch in ckpt.epochs(epochs):
                for numbers, x in ckpt.batches():
                    step = ckpt.cursor.step
                    loss = (model(x) - 1).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    line = [step, epoch, numbers.item(), loss.item().hex()]
                    print(json.dumps(line), file=file, flush=True)
                    time.sleep(SLOW_PACE_S if Path(trace, "slowly").exists() else PACE_S)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
