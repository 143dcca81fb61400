"""Train a small model on whatever is random on a GPU; every micro-batch is the same each time.

    python train.py --device cuda --run RUN [--backend gloo|nccl] [--captured] [--trace DIR]

With a backend it is a DDP training of the ranks that torchrun started, all on the first GPU. With
--captured a whole step is one CUDA graph, so nobody calls the optimizer: it asks for its saves by
itself. With --trace each rank appends a line for each micro-batch to a file of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainckpt

if TYPE_CHECKING:
    from collections.abc import Callable

ACCUMULATE, BATCH, ITEMS, WORDS, WIDTH, LENGTH = 3, 4, 60, 97, 64, 8
SAVE_EVERY = 4  # micro-batches, of a captured step
SLOW_S = 0.1  # a micro-batch


class Model(nn.Module):
    """Embedding, batch norm, attention of one head, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WORDS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, length, words]."""
        x = self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(self.drop(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1)
        return self.out(x + self.drop(weights) @ v)


def main() -> None:
    """Build everything, resume, train."""
    args = parse()
    device = prepare(args)
    rank = dist.get_rank() if args.backend else 0
    model: nn.Module = Model().to(device)
    if args.backend:
        ids = [0] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    data = TensorDataset(torch.randint(WORDS, (ITEMS, LENGTH)), torch.arange(ITEMS))
    sampler = DistributedSampler(data) if args.backend else None
    loader = DataLoader(
        data,
        BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    torch.manual_seed(10 + rank)  # the same weights on all ranks, but dropout of their own
    tracked: dict[str, Any] = {"model": model, "loader": loader}
    tracked |= captured(model, device) if args.captured else plain(model, device)
    step = tracked.pop("step")
    options = {"redundancy": args.redundancy} if args.redundancy else {}
    with trainckpt.Checkpointer(
        args.run, **tracked, every="2 steps", stop_at="micro-batch", **options
    ) as ckpt:
        train(args, ckpt, step, device, rank)
    if args.backend:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--redundancy")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--slow", type=Path, help="train slowly while this file is there")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> torch.device:
    """Make everything deterministic, join the other ranks, and return the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.backend:
        dist.init_process_group(args.backend)
    return device


def plain(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return what is tracked, and the function that trains one micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    scaler = torch.amp.GradScaler(device.type)

    def step(ids: torch.Tensor, *, last: bool) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, ids)
        scaler.scale(loss / ACCUMULATE).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    return {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "step": step}


def captured(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return what is tracked, and the function that trains one micro-batch: a graph's replay."""
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, capturable=on_gpu)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)

    def whole_step() -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return loss

    replay: Callable[[], torch.Tensor]
    if on_gpu:
        graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # the optimizer's state has to be there before
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                whole_step()
        torch.cuda.current_stream().wait_stream(beside)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            recorded = whole_step()

        def replay() -> torch.Tensor:
            graph.replay()
            return recorded

    else:

        def replay() -> torch.Tensor:
            optimizer.zero_grad()
            return whole_step()

    def step(batch: torch.Tensor, *, last: bool) -> float:
        ids.copy_(batch)
        return replay().item()

    return {"optimizer": optimizer, "step": step}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Predict each word from those that are there."""
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def train(
    args: argparse.Namespace,
    ckpt: trainckpt.Checkpointer,
    step: Callable[..., float],
    device: torch.device,
    rank: int,
) -> None:
    """Train so many micro-batches."""
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    if ckpt.cursor.micro_batches >= args.micro_batches:  # a finished run was started again
        return
    for _ in ckpt.epochs(args.micro_batches):
        for ids, items in ckpt.batches():
            cursor = ckpt.cursor
            if args.captured and cursor.micro_batches % SAVE_EVERY == 0:
                ckpt.save()
            loss = step(ids.to(device, non_blocking=True), last=cursor.micro == ACCUMULATE - 1)
            if args.trace:
                line = f"{cursor.micro_batches} {items.tolist()} {loss.hex()}\n"
                with (args.trace / f"rank{rank}.txt").open("a") as trace:
                    trace.write(line)
            if args.slow and args.slow.exists():
                time.sleep(SLOW_S)
            if cursor.micro_batches + 1 >= args.micro_batches:
                return


if __name__ == "__main__":
    main()
