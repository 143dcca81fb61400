"""Trains twice with every rank of a launch: straight, and as a run that loses a rank once.

    trainckpt run --nproc 2 --max-restarts 1 -- scarce_resources_script.py PLACE MEGABYTES ANSWERS

The first attempt of the run ends when its last rank kills itself. Each rank leaves in
ANSWERS/<rank>.json the digests of both ends, and the step from which the run went on.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer

STEPS, DIES_AT = 6, 4

logging.getLogger("trainckpt").addHandler(logging.StreamHandler())
logging.getLogger("trainckpt").setLevel(logging.DEBUG)


def parts(mb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`mb`: of parameters; gradients are as much, and what AdamW keeps is twice as much."""
    torch.manual_seed(0)
    width = int((mb * 1e6 / 8) ** 0.5)
    layers = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width))
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step; what a rank draws is its own."""
    model(torch.randn(2, model.module[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256(torch.random.get_rng_state().numpy())
    state = optimizer.state_dict()["state"]
    for tensor in [*model.parameters(), *(state[i][k] for i in state for k in sorted(state[i]))]:
        sha.update(tensor.detach().numpy())
    return sha.hexdigest()


def straight(mb: float) -> str:
    model, optimizer = parts(mb)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        train_on(model, optimizer)
    return digest(model, optimizer)


def run(place: str, mb: float) -> tuple[str, int | None]:
    model, optimizer = parts(mb)
    torch.manual_seed(dist.get_rank())
    with Checkpointer(place, model=model, optimizer=optimizer, every="1 steps") as ckpt:
        found = ckpt.resumed_from
        while ckpt.cursor.step < STEPS and ckpt.boundary():
            if ckpt.cursor.step in (DIES_AT - 1, DIES_AT) and found is None:
                # What was begun is committed: while it is not, the next boundary begins nothing.
                ckpt._attempt.saver.wait()
            dies = ckpt.cursor.step == DIES_AT and found is None
            if dies and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train_on(model, optimizer)
    return digest(model, optimizer), found.step if found else None


def main(place: str, mb: float, answers: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = straight(mb)
    gc.collect()
    ended, began = run(place, mb)
    answer = {"straight": wanted, "run": ended, "from": began}
    (answers / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
