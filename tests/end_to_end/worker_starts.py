"""A training whose loader starts its workers in one way: `python worker_starts.py RUN TRACE START`.

START is one of multiprocessing's methods, or "default". Each micro-batch is a line of TRACE. With a
number after it the whole process group, workers too, gets SIGTERM in that micro-batch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainckpt import Checkpointer

LENGTH, EPOCHS = 24, 2
DEFAULT = "default"


class Noisy(Dataset):
    """Draws from all three generators for every sample, in the worker."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(1).item() + float(np.random.randn()) + random.gauss(0, 1)
        return torch.tensor([index / LENGTH, drawn])


def main(run: str, trace: str, start: str, last: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    context = None if start == DEFAULT else start
    loader = DataLoader(Noisy(), 3, shuffle=True, num_workers=2, multiprocessing_context=context)
    with (
        Checkpointer(
            run, model=model, optimizer=optimizer, loader=loader, stop_at="micro-batch"
        ) as ckpt,
        open(trace, "a") as file,  # noqa: PTH123
    ):
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.batches():
                loss = model(batch).square().mean()
                (loss / 2).backward()
                if ckpt.cursor.micro % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                at = ckpt.cursor.micro_batches
                print(
                    at,
                    [value.hex() for value in batch[:, 1].tolist()],
                    loss.item().hex(),
                    file=file,
                )
                if at == last:
                    os.killpg(0, signal.SIGTERM)
    print("workers were started by", multiprocessing.get_start_method())


if __name__ == "__main__":
    main(*sys.argv[1:4], last=int(sys.argv[4]) if len(sys.argv) > 4 else -1)
