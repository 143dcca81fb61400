"""Estimate the bytes of a snapshot of the registered objects. Reads sizes, copies nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.state.adapters import fsdp

if TYPE_CHECKING:
    from trainckpt.state.registry import Registry


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the whole state, not of one rank's part.

    Attributes:
        state: At a window's end.
        gradients: Present now; 0 if not read.
        possible_gradients: If every parameter with `requires_grad` had one.
    """

    state: int
    gradients: int
    possible_gradients: int

    @property
    def now(self) -> int:
        """Return the bytes of a snapshot taken now."""
        return self.state + self.gradients


def weigh(registry: Registry, *, gradients: bool) -> StateBytes:
    """Return an estimate: training may add optimizer state later.

    `gradients`: count the present ones. Only for the training thread, at a boundary: to read
    `.grad` while another thread is in a backward corrupts torch's memory.
    """
    state = there = possible = 0
    for model in registry.models:
        state += sum(_bytes(buffer) for buffer in model.module.buffers())
        now, unsharded = fsdp.gradient_bytes(model.wrapped)
        there, possible = there + now, possible + unsharded
    for parameter in registry.trained_parameters().values():
        state += _bytes(parameter)
        if gradients and parameter.grad is not None:
            there += _bytes(parameter.grad)
        possible += _bytes(parameter) if parameter.requires_grad else 0
    for optimizer in registry.optimizers:
        for items in list(optimizer.optimizer.state.values()):
            if isinstance(items, dict):
                values = list(items.values())
                state += sum(_bytes(v) for v in values if isinstance(v, torch.Tensor))
    return StateBytes(state, there, possible)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the size, also of a sparse tensor; 0 if unknown."""
    try:
        if tensor.layout is torch.sparse_coo:
            return tensor._indices().nbytes + tensor._values().nbytes
        return tensor.nbytes
    except RuntimeError:
        return 0


def shard_bytes(registry: Registry, world: int, *, gradients: bool = False) -> int:
    """Estimate the bytes of one rank's shard file at a window's end, or with all `gradients`.

    Ranks share the state equal on all; the gradients of an open window mostly differ.
    """
    shared = any(isinstance(m.reducing, DistributedDataParallel) for m in registry.models)
    weight = weigh(registry, gradients=False)
    own = weight.possible_gradients if gradients else 0
    return weight.state // (world if shared else 1) + own
