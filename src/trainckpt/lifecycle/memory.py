"""How much memory this process may plan with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainckpt.tiers.memory import MemoryPlace

DEFAULT_SHARE = 0.4

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_limit_bytes() -> int | None:
    """The smaller of the host's memory and the cgroup's limit; None where neither can be read."""
    limits = [limit for limit in (_host_bytes(), *map(_read, _CGROUP_LIMITS)) if limit]
    return min(limits, default=None)


def num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def budget_bytes(share: float | None, num_bytes: int | None) -> int | None:
    """The option `memory_budget` in bytes: a share of the limit, or a number of its own."""
    if num_bytes is not None:
        return num_bytes
    limit = memory_limit_bytes()
    return None if limit is None or share is None else int(limit * share)


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def has_room(place: MemoryPlace, num_bytes: int) -> bool:
    """Whether so much may be brought into shared memory, what is there already given up for it."""
    budget = budget_bytes(DEFAULT_SHARE, None)
    room = place.free_bytes + place.num_bytes
    return num_bytes <= (room if budget is None else min(room, budget))
