"""Pause the garbage collector around imports, resumes and saves.

Each collection may visit all objects, 170 000 once torch is imported: a tenth of a second. Imports
of many modules make hundreds of thousands of lasting objects. A resume and a first save make some
for each tensor. All would start several collections, and few of those objects are garbage.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic collections inside; if the script has disabled them, they stay off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
