"""Note and compare the frozen parameters, those without `requires_grad`. Never restored.

Freezing is the script's own doing. If it unfreezes a layer only at the start of some epoch, a later
resume trains on with that layer frozen.
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
    """Return the names of frozen parameters."""
    return [name for name, parameter in parameters if not parameter.requires_grad]


def changed(registry: Registry, saved: Saved) -> dict[str, bool]:
    """Return name -> frozen then, for each parameter with another `requires_grad` now.

    Empty if the snapshot does not say it.
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
    """Return those parameters of `otherwise` still different now."""
    now = {name: p.requires_grad for model in registry.models for name, p in model.parameters()}
    return {name: was for name, was in otherwise.items() if now.get(name) == was}
