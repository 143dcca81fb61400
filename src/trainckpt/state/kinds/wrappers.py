"""Wrappers: what a script's object is inside, and which live DDP a module trains in.

Fabric and Accelerate hand a script thin wrappers, of modules and of optimizers, whose state is that
of the object inside. What is tracked, counted and named is the object inside.

Scripts track the module inside as well, wrap it after the Checkpointer was made, and wrap it again
once they have unfrozen parameters. So DDP modules are noted as they are made (torch calls a hook
for each module that is put into another), and those that were there before are looked for once.
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

from trainckpt.importing import without_collections

_REPLICATE = "torch.distributed._composable.replicate"

# Each DDP module, in the order they were made -> ids of what is in it, once somebody asked.
_live: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()
_watching: list[Any] = []


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DataParallel, torch.compile and Fabric wrappers."""
    wrappers: tuple[Any, ...] = (DistributedDataParallel, nn.DataParallel)
    while True:
        # no `or`: modules may have a length, and what torch.compile makes may raise on it
        inner = module.module if isinstance(module, wrappers) else None
        if inner is None:
            inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ == "_FabricModule":
            inner = getattr(module, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def unwrap_optimizer(value: Any) -> Any:
    """Return the optimizer whose groups and state a wrapper shows as its own, or `value` itself.

    Fabric's and Accelerate's wrappers are of that kind. An optimizer that steps by another one and
    has state beside it (SAM, Lookahead) is not.
    """
    inner = inner_optimizer(value)
    while inner is not None and _shows(value, inner):
        value, inner = inner, inner_optimizer(inner)
    return value


def inner_optimizer(value: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that an object holds as `.optimizer` and steps by, or None.

    Schedulers hold one too, but they zero no gradients.
    """
    inner = getattr(value, "optimizer", None) if hasattr(value, "zero_grad") else None
    is_one = isinstance(inner, torch.optim.Optimizer) and not isinstance(value, nn.Module)
    return inner if is_one and inner is not value else None


def _shows(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    groups, state = getattr(wrapper, "param_groups", None), getattr(wrapper, "state", None)
    return groups is inner.param_groups and state is inner.state


def newest(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP that a module trains in, or None: of itself, or else of something that holds it.

    Of several it is the last that was made, of those that a forward went through if any.
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
    """Whether its DDP is one that torch's older `replicate` makes amid the first forward."""
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
    """All objects. A collection between two generations would move some past the look at them."""
    with without_collections():
        return [each for generation in (2, 1, 0) for each in gc.get_objects(generation)]


def _note(parent: nn.Module, name: str, _: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _live[parent] = frozenset()


def _holds(wrapper: DistributedDataParallel, module: nn.Module) -> bool:
    """Whether it trains the module as a part of another, or its parameters without it."""
    if not _live[wrapper]:
        parts = (*wrapper.modules(), *wrapper.parameters())
        _live[wrapper] = frozenset(id(part) for part in parts)
    first = next((p for p in module.parameters() if p.requires_grad), None)
    return id(module) in _live[wrapper] or id(first) in _live[wrapper]
