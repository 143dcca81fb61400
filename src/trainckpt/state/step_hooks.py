"""Hooks of optimizer steps: which optimizers call them, and how compiled steps call them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainckpt.state.adapters.optimizer import inner_optimizers

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's `step` calls the pre-step hooks: an instance's own may not.

    Torch's learning rate schedulers set an instance `step` with the hooks in it.
    """
    own = vars(optimizer).get("step")
    passes = own is None or hasattr(own, "_wrapped_by_lr_sched")
    return passes and hasattr(type(optimizer).step, "hooked")


def counted_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer with working step hooks: itself, or an inner one.

    Torch installs the hooks in `Optimizer.__init__`, skipped by some wrappers. None: neither calls
    them.
    """
    tried = (optimizer, *(inner for _, inner in inner_optimizers(optimizer)))
    return next((one for one in tried if hasattr(type(one).step, "hooked")), None)


def untraced(hook: Callable[..., T]) -> Callable[..., T]:
    """Return the hook as a break in any graph of torch.compile: no graph can wait or communicate.

    Without `torch._dynamo` imported, return the hook itself: the import takes seconds. Making an
    optimizer imports it, and before that no step could be compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disable: Any = torch.compiler.disable
    found: Callable[..., T] = disable(hook)
    return found
