"""A training step that torch.compile compiles; `test_warm_starts` launches it.

    compiled_script.py RUN TIER LOSSES

Each step appends its loss and the compiler's counters to LOSSES. With KILLED_AT_STEP it waits there
for the copy of its compile caches in TIER, and dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import trainckpt

STEPS = 8


def main(run: str, tier: str, losses: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4 * STEPS, 32), torch.randint(8, (4 * STEPS,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    loss_of = torch.compile(lambda x, y: nn.functional.cross_entropy(model(x), y))
    killed_at = int(os.environ.get("KILLED_AT_STEP", "0"))
    options = {"every": "1 step", "tiers": [tier]}
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with trainckpt.Checkpointer(run, **tracked, **options) as ckpt, Path(losses).open("a") as file:
        for x, y in ckpt.batches():
            if killed_at and ckpt.cursor.step == killed_at:
                wait_for_copy(Path(tier, "compile-cache"))
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            compiler = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in HITS}
            line = {"step": ckpt.cursor.step, "loss": loss.item().hex(), **compiler}
            print(json.dumps(line), file=file, flush=True)


HITS = ("hit", "miss")


def wait_for_copy(folder: Path) -> None:
    while not any(folder.glob("*.json")):
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
