"""Capture and restore gradients of the open window: `.grad` of every parameter, if not None.

Inside a window under no_sync they are this rank's own; after a synchronization all ranks have equal
bytes, and one copy is stored. Some scripts put gradients into one buffer, and clip or reduce that.
So a gradient is copied into the existing tensor if that one is alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from trainckpt.state.dtensor import PLAIN
from trainckpt.state.zero_copy import has_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from trainckpt.state.captured import Captured, Saved

PART = "gradients"


def capture(out: Captured, parameters: Mapping[str, torch.Tensor]) -> None:
    """Add every gradient other than None."""
    out.apart[PART] = 2
    out.values[PART] = {
        name: out.add(f"{PART}/{name}", parameter.grad, PART)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def apply(saved: Saved, parameters: Mapping[str, torch.Tensor]) -> None:
    """Restore `.grad` of every parameter, None included."""
    stored = saved.values[PART]
    for name, parameter in parameters.items():
        node = stored.get(name)
        found = None if node is None else saved.tensor(node, parameter.device)
        if found is not None and _can_hold(parameter.grad, found):
            parameter.grad.copy_(found)
        else:
            parameter.grad = found


def _can_hold(live: torch.Tensor | None, found: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return True if a copy into the live gradient equals a fresh one."""
    if live is None or type(live) not in PLAIN or type(found) not in PLAIN:
        return False
    if live.is_sparse or found.is_sparse or live.requires_grad or live.is_inference():
        return False
    alike = (live.dtype, live.device, live.shape) == (found.dtype, found.device, found.shape)
    return alike and live.stride() == found.stride() and has_memory(live)
