"""The built-in example of `trainckpt demo`: a small network, dropout, accumulation, two workers.

    python -m trainckpt.prove.builtin [RUN]

Learns the parity of random bits. Everything a resume can get wrong is in it: dropout, random
augmentation in the workers, shuffling, momentum, a scheduler, gradients of an open window.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainckpt

ACCUMULATE, EPOCHS, ITEMS = 3, 2, 60


class NoisyParity(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of 16 bits with noise drawn in the worker, and their parity."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = torch.tensor([(index * 2654435761 >> shift) & 1 for shift in range(16)])
        noise = torch.randn(16) * 0.1 + random.gauss(0, 0.1)
        return bits.float() + noise, bits.sum() % 2


def main() -> None:
    """Train, under plain python or torchrun."""
    random.seed(0)
    torch.manual_seed(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
    )
    data = NoisyParity()
    sampler: DistributedSampler[Any] | None = None
    if world > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = DataLoader(data, 4, shuffle=sampler is None, sampler=sampler, num_workers=2)
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/demo"
    with trainckpt.Checkpointer(
        run, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every="2 steps"
    ) as ckpt:
        for _ in ckpt.epochs(EPOCHS):
            for inputs, labels in ckpt.batches():
                loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATE
                loss.backward()  # type: ignore[no-untyped-call]
                if ckpt.cursor.micro == ACCUMULATE - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
