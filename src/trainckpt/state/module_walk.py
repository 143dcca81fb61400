"""Walk the modules of a model once, and prove later that they register the same tensors.

A walk takes microseconds a tensor, and a save or resume needs several. The proof reads the
dictionaries of each module, and compares their keys, and their values by identity, in a tenth of
that time.
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn

from trainckpt.state.adapters import fsdp

# A class that answers one of these in a way of its own is walked each time.
_WALKS = ("named_parameters", "named_buffers", "named_modules", "modules", "_named_members")
_HELD = ("_parameters", "_buffers", "_modules")


class ModuleWalk:
    """The modules of a model, and all that they registered when they were walked.

    Attributes:
        found: Results of walks; as valid as the walk.
        can_be_proven: `is_current` can say so. Otherwise it may hold within one boundary.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, Any] = {}
        self._modules = list(module.modules())
        self.can_be_proven = not fsdp.units(module) and all(map(_walks_as_torch, self._modules))
        self._registered = _registered(self._modules) if self.can_be_proven else None

    def is_current(self) -> bool:
        """Return True if a new walk would find the same modules, names and tensors."""
        if (then := self._registered) is None:
            return False
        now = _registered(self._modules)
        return then[:-1] == now[:-1] and all(map(operator.is_, then[-1], now[-1]))


def _registered(modules: list[nn.Module]) -> tuple[list[Any], list[int], list[str], list[Any]]:
    """Return the buffers not persistent, the sizes of all dictionaries, their keys and values."""
    kinds = [kind for m in modules for kind in (m._parameters, m._buffers, m._modules)]
    return (
        [frozenset(module._non_persistent_buffers_set) for module in modules],
        list(map(len, kinds)),
        list(chain.from_iterable(kinds)),
        list(chain.from_iterable([kind.values() for kind in kinds])),
    )


def _walks_as_torch(module: nn.Module) -> bool:
    """Return True for a module walked by torch's own methods. Those of TorchScript are not."""
    kind, held = type(module), vars(module)
    has_plain = all(isinstance(held.get(name), dict) for name in _HELD)
    return has_plain and not any(
        getattr(kind, name) is not getattr(nn.Module, name) or name in held for name in _WALKS
    )
