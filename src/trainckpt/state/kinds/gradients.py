"""Gradients of the open window: `.grad` of every parameter, absent where it is None.

Inside a window under no_sync they are this rank's own; where they were synchronized, all ranks
hold equal bytes and one copy is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        parameter.grad = None if node is None else saved.tensor(node, parameter.device)
