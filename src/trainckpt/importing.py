"""Imports of many modules, without the garbage collector's visits in between.

They make hundreds of thousands of objects that stay. Each visit of the oldest generation looks at
all that torch has made as well, a tenth of a second, and finds nothing.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_collections() -> Iterator[None]:
    """No collection while the block runs; afterwards as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
