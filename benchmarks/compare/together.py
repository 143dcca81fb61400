"""What the ranks do together: meet, agree on the slowest one's time, on an error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def slowest(seconds: float) -> float:
    """The largest `seconds` of all ranks, on all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def timed(act: Callable[[], object]) -> float:
    """Seconds from when all ranks begin `act` at once to when the last has done it."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    return slowest(time.perf_counter() - begun)
