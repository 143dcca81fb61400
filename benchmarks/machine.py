"""What the figures of a benchmark depend on, in words."""

from __future__ import annotations

import os
import platform

from trainckpt.tiers import large_pages


def words() -> str:
    """Processor, cores, and what large pages the system gives to who asks."""
    asked = sorted(size for size, who in large_pages.given().items() if who == "madvise")
    pages = " and ".join(f"{size >> 10} KiB" for size in asked) or "none"
    return f"{platform.machine()}, {os.cpu_count()} cores, large pages on request: {pages}"
