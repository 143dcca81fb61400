"""DDP over NCCL, with a Checkpointer, held from its third step on as held_example.py is.

Each rank appends a line for each micro-batch to a file of its own. BACKEND names another backend,
for a machine without a GPU.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.process_dump.held_example import hold
from trainckpt.ranks import process_groups

BACKEND, RANK = os.environ.get("BACKEND", "nccl"), int(os.environ["LOCAL_RANK"])
WIDTH, ITEMS = 256, 64


def main():
    parser = argparse.ArgumentParser()
    for name in ("run", "trace", "steps"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_known_args()[0]
    device = torch.device("cuda", RANK) if BACKEND == "nccl" else torch.device("cpu")
    if BACKEND == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKEND)
    torch.manual_seed(7)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers).to(device), bucket_cap_mb=0.1
    )
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(8 + dist.get_rank())
    data = TensorDataset(torch.randn(ITEMS, WIDTH))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    Path(args.trace).mkdir(exist_ok=True)
    register_optimizer_step_pre_hook(hold)
    with (
        (Path(args.trace) / f"rank{dist.get_rank()}.txt").open("a") as trace,
        trainckpt.Checkpointer(
            args.run, model=model, optimizer=optimizer, loader=loader, every="100 steps"
        ) as ckpt,
    ):
        for _ in ckpt.epochs(int(args.steps)):
            for (inputs,) in ckpt.batches():
                loss = model(inputs.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                trace.write(f"{ckpt.cursor.step} {loss.item().hex()}\n")
                trace.flush()
                if ckpt.cursor.step >= int(args.steps):
                    break
            if ckpt.cursor.step >= int(args.steps):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    process_groups.TAKEN_DOWN.add(BACKEND)
    main()
