"""A small training script in which every kind of state matters. With --break, one is not restored.

Under plain python, or with RANK and WORLD_SIZE set. The model's layers are used in another order
than they are defined in, so that DDP regroups its buckets; BatchNorm's statistics, which forward
reads, are this rank's own inside a window; the moments are float32 on bfloat16 weights; the
main process and the loader's workers draw from all three generators; the sampler gets a new seed
after each epoch.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from contextlib import nullcontext

import numpy as np
import sabotage
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainckpt

ACCUMULATE, EPOCHS, ITEMS, BATCH, WIDTH = 3, 2, 24, 2, 24


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    seed_all(0)
    model = net = Net(extra=args.find_unused)
    if dist.is_initialized():
        model = DistributedDataParallel(
            net, bucket_cap_mb=0.001, find_unused_parameters=args.find_unused
        )
    optimizer = Float32Adam(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    sampler = DistributedSampler(Noisy(), world, rank)
    loader = DataLoader(Noisy(), BATCH, sampler=sampler, num_workers=args.workers)
    seed_all(None if args.unseeded else 1 + rank)
    tracked = {} if args.forget_scheduler else {"scheduler": scheduler}
    sabotage.KINDS[args.broken]()

    with trainckpt.Checkpointer(
        args.run, model=model, optimizer=optimizer, loader=loader, every="never", **tracked
    ) as ckpt:
        torch.rand(3)  # a sanity check before the loop draws, and must not shift what follows
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.batches():
                began = ckpt.cursor
                if (began.step, began.micro) == args.fail_at:
                    sys.exit(3)
                last = began.micro + 1 == ACCUMULATE
                extra = args.find_unused and began.micro == 0
                with nullcontext() if last or world == 1 else model.no_sync():
                    loss_of(model, batch, extra=extra, drift=args.drift).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            sampler.seed += 1000
    if dist.is_initialized():
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    flags = argparse.ArgumentParser()
    add = flags.add_argument
    add("--run", default="runs/sensitivity")
    add("--workers", type=int, default=2)
    add("--break", dest="broken", choices=list(sabotage.KINDS), default="nothing")
    add("--find-unused", action="store_true", help="one layer only in a window's first part")
    add("--forget-scheduler", action="store_true", help="do not tell the Checkpointer of it")
    add("--unseeded", action="store_true", help="dropout and noise differ in every run")
    add("--drift", action="store_true", help="depend on the clock, as a bad script would")
    add("--fail-at", type=lambda text: tuple(map(int, text.split(","))), help="STEP,MICRO")
    return flags.parse_args()


def seed_all(seed: int | None) -> None:
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def loss_of(model: nn.Module, batch, *, extra: bool, drift: bool) -> torch.Tensor:
    inputs, labels = batch
    noise = random.random() + np.random.random()
    if drift:
        noise += time.time() % 1
    return cross_entropy(model(inputs + 0.1 * noise, extra), labels) / ACCUMULATE


class Noisy(Dataset):
    """Rows of bits, each with noise from the three generators of the worker."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        bits = [(index * 2654435761 >> shift) & 1 for shift in range(WIDTH)]
        noise = torch.randn(WIDTH) + random.random() + np.random.random()
        return torch.tensor(bits) + 0.1 * noise, sum(bits) % 2


class Net(nn.Module):
    """float32[batch, WIDTH] in, float32[batch, 2] out."""

    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH) if extra else None
        self.head = nn.Linear(WIDTH, 2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = self.norm(self.first(x)).relu() + 0.1 * self.norm.running_mean.clone()
        x = x + self.narrow(self.dropout(x).to(torch.bfloat16)).float()
        if extra:
            x = x + self.extra(x)
        return self.head(x)


class Float32Adam(torch.optim.Optimizer):
    """Adam with float32 moments and a float32 copy of the weights, whatever the weights are."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])

    def update(self, p: torch.Tensor, lr: float) -> None:
        state = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone(), master=p.float().clone())
        state["step"] += 1
        grad = p.grad.float()
        state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
        state["exp_avg_sq"].mul_(0.99).add_(grad * grad, alpha=0.01)
        spread = (state["exp_avg_sq"].float() / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
        state["master"].sub_(lr / (1 - 0.9 ** state["step"]) * state["exp_avg"].float() / spread)
        p.copy_(state["master"])


if __name__ == "__main__":
    main()
