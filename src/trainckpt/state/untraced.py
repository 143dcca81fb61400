"""Hooks that run as they are in a step that torch.compile has compiled.

It would trace into them, and they do what no graph can hold: wait, copy, talk to other ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def untraced(hook: Callable[..., T]) -> Callable[..., T]:
    """The same hook, at which a compiled graph ends, and goes on behind it.

    To import what compiles takes seconds. Making an optimizer has done so; before that there is
    nothing yet whose step could be compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disable: Any = torch.compiler.disable
    found: Callable[..., T] = disable(hook)
    return found
