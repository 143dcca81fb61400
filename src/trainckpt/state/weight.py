"""How many bytes a snapshot of the registered objects would hold. Reads sizes, copies nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from trainckpt.state.kinds import fsdp

if TYPE_CHECKING:
    from trainckpt.state.registry import Registry


@dataclass(frozen=True)
class Weight:
    """Bytes of the whole, not of one rank's part.

    Attributes:
        state: At a window's end.
        gradients: That are there now; 0 if they were not looked at.
        possible_gradients: That there would be if every parameter that wants one had one.
    """

    state: int
    gradients: int
    possible_gradients: int

    @property
    def now(self) -> int:
        """Of a snapshot taken now."""
        return self.state + self.gradients


def weigh(registry: Registry, *, gradients: bool) -> Weight:
    """An estimate: training may add optimizer state meanwhile.

    Args:
        registry: What is tracked.
        gradients: Whether to look at those that are there: only the training thread may, at a
            boundary. To read `.grad` while another thread is in a backward corrupts torch's memory.
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
    return Weight(state, there, possible)


def _bytes(tensor: torch.Tensor) -> int:
    """Also of a sparse one; 0 where it cannot be known."""
    try:
        if tensor.layout is torch.sparse_coo:
            return tensor._indices().nbytes + tensor._values().nbytes
        return tensor.nbytes
    except RuntimeError:
        return 0


def shard_bytes(registry: Registry, world: int, *, gradients: bool = False) -> int:
    """About how large one rank's shard file will be at a window's end, or with all `gradients`.

    Ranks share what is alike on them; the gradients of an open window most often are not.
    """
    shared = any(isinstance(m.reducing, DistributedDataParallel) for m in registry.models)
    weight = weigh(registry, gradients=False)
    own = weight.possible_gradients if gradients else 0
    return weight.state // (world if shared else 1) + own
