"""Frozen: which parameters require no gradient. Noted and compared, never put back.

It is the script's own doing: one that unfreezes a layer where some epoch begins, and only there,
trains on with that layer frozen if it is resumed later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry

KEY = "frozen"


def capture(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of those that require no gradient."""
    return [name for name, parameter in parameters if not parameter.requires_grad]


def changed(registry: Registry, saved: Saved) -> dict[str, bool]:
    """Parameters of which that was saved otherwise than it is now -> whether they were frozen.

    None of a snapshot that does not say it.
    """
    found: dict[str, bool] = {}
    for model in registry.models:
        then = saved.values[model.name].get(KEY)
        if isinstance(then, list):
            stored = set(then)
            found |= {
                name: name in stored
                for name, parameter in model.parameters()
                if parameter.requires_grad == (name in stored) and name not in saved.left
            }
    return found


def still(registry: Registry, otherwise: dict[str, bool]) -> dict[str, bool]:
    """Those that are not as they were then even now."""
    now = {name: p.requires_grad for model in registry.models for name, p in model.parameters()}
    return {name: was for name, was in otherwise.items() if now.get(name) == was}
