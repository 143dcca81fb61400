"""Gradients of the open window: `.grad` of every parameter, absent where it is None.

Inside a window under no_sync they are this rank's own; where they were synchronized, all ranks
hold equal bytes and one copy is kept. Some scripts lay gradients into one buffer, and clip or
reduce that: so a gradient goes into the tensor that is there, if there is one like it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from trainckpt.state.given import has_memory
from trainckpt.state.sharded import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from trainckpt.state.captured import Captured, Saved

PART = "gradients"


def capture(out: Captured, parameters: Mapping[str, torch.Tensor]) -> None:
    """Add every gradient that is not None."""
    out.apart[PART] = 2
    out.values[PART] = {
        name: out.add(f"{PART}/{name}", parameter.grad, PART)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def apply(saved: Saved, parameters: Mapping[str, torch.Tensor]) -> None:
    """Make `.grad` of every parameter what it was, None included."""
    stored = saved.values[PART]
    for name, parameter in parameters.items():
        node = stored.get(name)
        found = None if node is None else saved.tensor(node, parameter.device)
        if found is not None and _can_hold(parameter.grad, found):
            parameter.grad.copy_(found)
        else:
            parameter.grad = found


def _can_hold(live: torch.Tensor | None, found: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether what was saved can be copied to a gradient, and it is then as it would be anew."""
    if live is None or type(live) not in PLAIN or type(found) not in PLAIN:
        return False
    if live.is_sparse or found.is_sparse or live.requires_grad or live.is_inference():
        return False
    alike = (live.dtype, live.device, live.shape) == (found.dtype, found.device, found.shape)
    return alike and live.stride() == found.stride() and has_memory(live)
