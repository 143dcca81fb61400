"""A run that writes a line for each step: `python -m tests.end_to_end.accounted RUN TRACE`.

It kills itself where it is told to: no signal from outside hits the same instruction twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainckpt import Checkpointer

STEP_S, EVALUATION_S = 0.004, 0.1
ACCUMULATE = 2


def killed_here(when: str, arguments: argparse.Namespace, trained: int) -> None:
    if arguments.kill == when and trained == arguments.after:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.end_to_end.accounted", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="10 steps")
    parser.add_argument("--kill", choices=["batch", "step", "evaluation"])
    parser.add_argument("--after", type=int, default=0, help="micro-batches of this attempt")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=2)
    trained = 0
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with (
        arguments.trace.open("a", buffering=1) as trace,
        Checkpointer(arguments.run, every=arguments.every, keep_last=99, **tracked) as ckpt,
    ):
        for _ in ckpt.epochs(arguments.steps * ACCUMULATE // len(loader)):
            for (x,) in ckpt.batches():
                killed_here("batch", arguments, trained)
                time.sleep(STEP_S)
                model(x).square().mean().backward()
                if ckpt.cursor.micro == ACCUMULATE - 1:
                    optimizer.step()
                    trace.write(f"{ckpt.attempt} {ckpt.cursor.step}\n")
                    optimizer.zero_grad()
                trained += 1
                killed_here("step", arguments, trained)
            with ckpt.evaluation():
                if arguments.kill == "evaluation" and trained >= arguments.after:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(EVALUATION_S)
    arguments.run.with_name("ended").write_text(f"{time.time()}")


if __name__ == "__main__":
    main()
