"""What the figures of a benchmark depend on, in words."""

from __future__ import annotations

import os
import platform


def words() -> str:
    """Return the processor and the number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
