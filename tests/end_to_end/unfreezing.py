"""Trains a model whose layers join the optimizer one by one, as gradual unfreezing does."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from trainckpt import Checkpointer


def once(epoch, optimizer):
    """Where the epoch begins, whatever there is."""
    return epoch == 1


def unless_there(epoch, optimizer):
    """From then on, if it is not there."""
    return epoch >= 1 and len(optimizer.param_groups) == 1


def train(place, joins, until, tracks_all=True, make=torch.optim.AdamW, **options):
    """Micro-batches up to `until`; the state after each, and the Checkpointer."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    optimizer = make(model[1].parameters(), 0.01)
    data = DataLoader(TensorDataset(torch.randn(6, 3)), 2)
    seen = {}
    tracked = model if tracks_all else model[1]
    with Checkpointer(
        place, model=tracked, optimizer=optimizer, loader=data, every="never", **options
    ) as ckpt:
        for epoch in ckpt.epochs(4):
            if joins(epoch, optimizer):
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})
            for (x,) in ckpt.batches():
                model[1](model[0](x).relu()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[-1]["lr"] *= 0.9
                state = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
                seen[ckpt.cursor.micro_batches] = (
                    [tensor.tolist() for tensor in state],
                    [group["lr"] for group in optimizer.param_groups],
                )
                if ckpt.cursor.micro_batches + 1 == until:
                    return seen, ckpt
    return seen, ckpt


def whole(tensor):
    """Of what is sharded, all of it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def train_sharded(rank, place, steps):
    """Steps of a sharded model, of which a layer joins with the second, unless the run is resumed;
    its groups and moments as they are then."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model[1].parameters(), 0.01)
    with Checkpointer(place, model=model, optimizer=optimizer, every="never") as ckpt:
        for number in range(steps):
            ckpt.boundary()
            if number == 1:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = optimizer.param_groups
        moments = [whole(optimizer.state[p]["exp_avg"]) for g in groups for p in g["params"]]
        return [group["lr"] for group in groups], moments, ckpt.resumed_from is not None
