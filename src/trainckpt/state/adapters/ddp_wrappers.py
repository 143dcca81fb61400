"""Unwrap the script's objects, and find the live DDP of a module.

Fabric and Accelerate give a script thin wrappers of modules and optimizers. Their state is that of
the inner object, so the inner object is tracked, counted and named.

Scripts may track the inner module, wrap it after the Checkpointer is made, and wrap it again after
unfreezing parameters. So DDP modules are noted as they are made: torch calls a hook for each module
registered in another. Earlier ones are searched for once.
"""

from __future__ import annotations

import gc
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from trainckpt.gc_pause import gc_paused

_REPLICATE = "torch.distributed._composable.replicate"

# Each DDP module, in the order they were made -> ids of its parts, computed at first use.
_live: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()
_watching: list[Any] = []


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP, DataParallel, torch.compile and Fabric wrappers."""
    wrappers: tuple[Any, ...] = (DistributedDataParallel, nn.DataParallel)
    while True:
        # no `or`: modules may have a length, and torch.compile's wrapper may raise on it
        inner = module.module if isinstance(module, wrappers) else None
        if inner is None:
            inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ == "_FabricModule":
            inner = getattr(module, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def unwrap_optimizer(value: Any) -> Any:
    """Return the inner optimizer if `value` exposes its groups and state, or `value` itself.

    Fabric's and Accelerate's wrappers do. An optimizer with state besides its inner one (SAM,
    Lookahead) does not.
    """
    inner = inner_optimizer(value)
    while inner is not None and _shows(value, inner):
        value, inner = inner, inner_optimizer(inner)
    return value


def inner_optimizer(value: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer stepped by an object, its `.optimizer`, or None.

    Schedulers have one too, but no `zero_grad`.
    """
    inner = getattr(value, "optimizer", None) if hasattr(value, "zero_grad") else None
    is_one = isinstance(inner, torch.optim.Optimizer) and not isinstance(value, nn.Module)
    return inner if is_one and inner is not value else None


def _shows(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    groups, state = getattr(wrapper, "param_groups", None), getattr(wrapper, "state", None)
    return groups is inner.param_groups and state is inner.state


def newest(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP of a module, or None: its own, or else that of an enclosing module.

    Of several it is the last one made, preferably among those used in a forward.
    """
    if not torch.distributed.is_initialized():
        return None
    _watch()
    known = [each for each in _live if hasattr(each, "reducer")]  # made to the end
    found = [each for each in known if unwrap(each) is module]
    found = found or [each for each in known if _holds(each, module)]
    used = [each for each in found if getattr(each, "_lazy_init_ran", False)]
    return next(reversed(used or found), None)


def is_hidden(module: nn.Module) -> bool:
    """Return True if torch's older `replicate` makes the DDP during the first forward."""
    kind = getattr(sys.modules.get(_REPLICATE), "DDP", None)
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def _watch() -> None:
    if _watching:
        return
    _watching.append(register_module_module_registration_hook(_note))
    for each in _from_the_oldest():
        # type() and not isinstance(), which asks proxies for their __class__
        if issubclass(type(each), DistributedDataParallel):
            _live[each] = frozenset()


def _from_the_oldest() -> list[Any]:
    """Return all objects, oldest generation first.

    A collection in between would move some objects past the search.
    """
    with gc_paused():
        return [each for generation in (2, 1, 0) for each in gc.get_objects(generation)]


def _note(parent: nn.Module, name: str, _: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _live[parent] = frozenset()


def _holds(wrapper: DistributedDataParallel, module: nn.Module) -> bool:
    """Return True if the wrapper trains the module as a part of another, or only its parameters."""
    if not _live[wrapper]:
        parts = (*wrapper.modules(), *wrapper.parameters())
        _live[wrapper] = frozenset(id(part) for part in parts)
    first = next((p for p in module.parameters() if p.requires_grad), None)
    return id(module) in _live[wrapper] or id(first) in _live[wrapper]
