"""No collections: a short while in which the interpreter does not look for cycles.

Each look may be at all objects there are, 170 000 once torch is imported; and what a resume makes
would have that happen several times over, and little of it is given up.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, none begins by itself; where the script has turned them off, they stay off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
