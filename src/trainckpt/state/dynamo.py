"""Run hooks untraced in a step compiled by torch.compile.

The compiler would trace into them, but no graph can wait, copy or talk to other ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def untraced(hook: Callable[..., T]) -> Callable[..., T]:
    """Return the hook as a break in any compiled graph.

    Without `torch._dynamo` imported, return the hook itself: the import takes seconds. Making an
    optimizer imports it, and before that no step could be compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disable: Any = torch.compiler.disable
    found: Callable[..., T] = disable(hook)
    return found
