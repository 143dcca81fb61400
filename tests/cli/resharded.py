"""Real ranks: a small model sharded by FSDP2, and what other programs do with its snapshots."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainckpt import Checkpointer, load
from trainckpt.storage.local import LocalTier


def plain(seed=0):
    """A model with uneven rows."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def make(world, seed=0):
    """The same, sharded over all ranks; equal on any number of them."""
    model = plain(seed)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_sharded(rank, place):
    """Two steps on the same data on every rank; the whole parameters."""
    model = make(torch.distributed.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(5)
    with Checkpointer(place, model=model, optimizer=optimizer, every="never") as ckpt:
        for _ in range(2):
            ckpt.boundary()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.full_tensor().tolist() for n, p in model.named_parameters()}


def load_sharded(rank, place):
    """Load into another sharded model; its whole parameters, and whether this rank read all."""
    model = make(torch.distributed.get_world_size(), seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    read = []
    reading = LocalTier.read_parts

    def note(tier, key, *parts):
        read.append(key.rpartition("/")[2])
        reading(tier, key, *parts)

    LocalTier.read_parts = note
    load(place, into=model, only="0.weight")
    others = {f"rank{r:05d}.safetensors" for r in range(2) if r != rank}
    LocalTier.read_parts = reading
    load(place, into={"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.01
    first = model[0].weight
    assert optimizer.state[first]["exp_avg"].placements == first.placements
    new = make(torch.distributed.get_world_size(), seed=4)
    with Checkpointer(f"{place}-new", model=new, init_from=place):
        for name, parameter in new.named_parameters():
            assert torch.equal(parameter.full_tensor(), model.get_parameter(name).full_tensor())
    whole = {n: p.full_tensor().tolist() for n, p in model.named_parameters()}
    return whole, bool(others & {*read})
