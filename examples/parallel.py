"""How char_gpt.py is spread over its ranks, one layout for each value of `--parallel`.

none   one process
ddp    every rank has the whole model
fsdp   every tensor is cut between all ranks (FSDP2)
hsdp   cut between two ranks, with a replica of that for each further pair. Of two ranks it is
       1 x 2, for 2 x 1 would be ddp by another name; an odd number is not cut in pairs: 1 x n
tp     the ranks of a pair compute one micro-batch together, each with half of the attention
       heads and of the hidden neurons, and fsdp between the pairs; an odd number: "pairs" of one

Nothing here is there for checkpoints, but `Layout.options` says which ranks see the same data.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = ("none", "ddp", "fsdp", "hsdp", "tp")


class Layout:
    """Who has which part of the model and of the data.

    Attributes:
        share: (which, of how many) share of the data this rank reads.
        options: What a Checkpointer must be told of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.mesh = _mesh(name, world)
        self.share = (dist.get_rank(), world) if dist.is_initialized() else (0, 1)
        self.options = {}
        if name == "tp":
            data = self.mesh["dp"]
            self.share = data.get_local_rank(), data.size()
            self.options = {"mesh": self.mesh, "data_dims": ("dp",)}

    def spread(self, gpt: nn.Module) -> nn.Module:
        """Lay a model that is the same on all ranks over them; gives what is to be called."""
        if self.name == "none":
            return gpt
        if self.name == "ddp":
            return DistributedDataParallel(gpt)
        mesh = self.mesh["dp"] if self.name == "tp" else self.mesh
        for block in gpt.blocks:
            if self.name == "tp":
                parallelize_module(block, self.mesh["tp"], _cut_by_neurons())
            fully_shard(block, mesh=mesh)
        return fully_shard(gpt, mesh=mesh)


def _mesh(name, world):
    pair = world if world % 2 else 2
    shapes = {
        "fsdp": {"dp": world},
        "hsdp": {"replicate": world // pair, "shard": pair},
        "tp": {"dp": world, "tp": 1} if world % 2 else {"dp": world // 2, "tp": 2},
    }
    if name not in shapes:
        return None
    shape = shapes[name]
    mesh = init_device_mesh("cpu", (*shape.values(),), mesh_dim_names=(*shape,))
    if name == "tp":
        mesh._flatten()  # so that a norm is summed over all ranks at once
    return mesh


def _cut_by_neurons():
    """Of a block: layers cut by what they give, each followed by one cut by what it takes."""
    return {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "mlp.1": ColwiseParallel(),
        "mlp.3": RowwiseParallel(),
    }


def micro_batch(model, *, last: bool):
    """Around the forward and backward of a micro-batch.

    Gradients stay on this rank until the last one of the step: `.grad` under DDP; under FSDP whole,
    in FSDP's own hands.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    wait = isinstance(model, DistributedDataParallel) and not last
    return model.no_sync() if wait else nullcontext()


def clip_gradients(model: nn.Module, norm: float) -> None:
    """As `clip_grad_norm_`, which knows no gradients of several meshes; "tp" has such."""
    by_mesh = {}
    for p in model.parameters():
        if p.grad is not None:  # frozen ones have none
            by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [whole(nn.utils.get_total_norm([p.grad for p in ps])) for ps in by_mesh.values()]
    total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    for ps in by_mesh.values():
        nn.utils.clip_grads_with_norm_(ps, norm, total)


def whole(tensor):
    """All of a tensor of which this rank may have a part only."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
