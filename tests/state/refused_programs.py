"""Real ranks with a model that torch itself cannot keep together."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError


def parallel_under_ddp(rank, place, has_trained):
    """Tensor parallelism under DDP; what a Checkpointer of it says, and its hint."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    if has_trained:
        wrapped(torch.ones(2, 4)).sum().backward()
    try:
        Checkpointer(place, model=wrapped, optimizer=optimizer, mesh=mesh, data_dims=("dp",))
    except ConfigurationError as error:
        return error.message, error.hint
    return "", ""
