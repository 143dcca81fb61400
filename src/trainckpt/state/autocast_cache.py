"""Find casts of the weights that torch.autocast keeps beyond an optimizer's step.

Autocast casts a weight once, and keeps the cast until the outermost block is left. In a loop inside
the block, training goes on with the weights of before the step; a resume casts them anew. Torch
does not show its cache. So a tensor of our own is cast along, and then given another value: a later
cast with the old value shows that the cache has lived since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainckpt.state.registry import Registry

REASON = (
    "the loop runs inside torch.autocast, which keeps its casts of the weights until the block is "
    "left, beyond optimizer steps, and a resume casts them anew: put autocast around the forward "
    "pass and the loss alone, or pass cache_enabled=False"
)
_VALUES = 128  # whole numbers that bfloat16 holds exactly


class AutocastCache:
    """Observer of one attempt's boundaries, on the training thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kinds: frozenset[str] | None = None
        self._marker: torch.Tensor | None = None
        self._value = 0
        self._since = 0  # the step at which the marker's cast was made

    def outlives_step(self, step: int) -> bool:
        """Return True, once, if casts have outlived an optimizer's step; `step`: steps by now."""
        if self._kinds is None:
            kinds = {each.type for each in self._registry.devices()}
            self._kinds = frozenset(filter(torch.amp.is_autocast_available, kinds))
        if not any(torch.is_autocast_enabled(kind) for kind in self._kinds):
            self._marker = None  # a later block has a cache of its own
            return False
        if not torch.is_autocast_cache_enabled():
            return False
        if self._marker is None:
            self._marker = torch.zeros(1, requires_grad=True)
            self._value = 0
        has_lived = self._cast_value() != self._value
        if not has_lived:
            self._since = step
        self._value = (self._value + 1) % _VALUES
        self._marker.data.fill_(self._value)
        if not (has_lived and step > self._since and self._casts_weights()):
            return False
        self._kinds = frozenset()  # said once
        return True

    def _cast_value(self) -> int:
        """Return the marker's value as autocast has it: from its cache, if it is there."""
        assert self._marker is not None
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            return int(torch.matmul(self._marker, torch.ones(1)).item())

    def _casts_weights(self) -> bool:
        """Return True if a weight is of the type that is cast: a leaf in float32, in training."""
        return any(
            p.requires_grad and p.is_leaf and p.dtype == torch.float32
            for model in self._registry.models
            if not hasattr(model.module, "_orig_mod")  # compiled: it casts in each call
            for p in model.module.parameters()
        )
