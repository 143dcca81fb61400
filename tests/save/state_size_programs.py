"""Ranks that count the bytes of a model they share."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainckpt.save.estimates import gradient_bytes, shard_bytes, weigh
from trainckpt.state.registry import Registry


def count(rank, kind, world):
    """Bytes of the whole state, of this rank's file, of that with gradients, and of gradients."""
    model = nn.Linear(8, 8, bias=False)
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    registry = Registry()
    registry.add("model", model)
    return (
        weigh(registry, gradients=False).state,
        shard_bytes(registry, world),
        shard_bytes(registry, world, gradients=True),
        gradient_bytes(registry, world),
    )
