"""Two ranks that know nothing of checkpoints: DDP over gloo, a line a step on standard output.

With WORKERS=2 the batches come from loader processes. The last of COUNT steps is taken once the
file GATE is there, if one is named.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

COUNT = int(os.environ.get("COUNT", "60"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.05"))
GATE = os.environ.get("GATE")
WORKERS = int(os.environ.get("WORKERS", "0"))


class Numbers(Dataset):
    """Samples of 64 KB, so that a batch in shared memory is more than CRIU's own limit."""

    def __len__(self):
        return 16 * COUNT

    def __getitem__(self, index):
        return torch.full((16384,), float(index)) + torch.rand(1)


def say(line):
    """One write a line: the ranks append to one file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def batches(rank):
    if not WORKERS:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(COUNT):
            yield torch.randn(16, 64, generator=generator)
        return
    torch.manual_seed(rank)
    for batch in DataLoader(Numbers(), batch_size=16, num_workers=WORKERS):
        yield batch[:, :64]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches(rank)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"rank {rank} step {step} loss {loss.item().hex()}")
        time.sleep(PAUSE_S)
        while GATE and step == COUNT - 2 and not Path(GATE).exists():
            time.sleep(0.02)
    say(f"rank {rank} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
