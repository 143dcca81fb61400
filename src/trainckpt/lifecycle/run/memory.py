"""How much memory this process may plan with: what host and cgroups allow, and have left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.tiers import host_memory

if TYPE_CHECKING:
    from trainckpt.tiers.memory import MemoryPlace

DEFAULT_SHARE = 0.4
MAX_COPY_THREADS = 4  # more than that memory does not feed
SPARE_BYTES = 64 << 20  # left free for whatever else there is
GRADIENTS = 0.5  # as much of a state: of AdamW's a third, of SGD's with momentum half
PROCESS_BYTES = 256 << 20  # of one that has imported torch and joined a group


def available_bytes() -> int | None:
    """What host and cgroups have left for all their processes; None where nobody says."""
    left = host_memory.left_bytes()
    return None if left is None else max(left - SPARE_BYTES, 0)


def num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copy_threads(num_ranks: int, *, beside_training: bool = False) -> int:
    """That each of so many ranks of a host may copy with at once: its share of the cores.

    Beside training one less, which trains: else both take turns at a core, and a step loses what
    its copy gains.
    """
    share = num_cores() // num_ranks - beside_training
    return min(MAX_COPY_THREADS, max(1, share))


def budget_bytes(share: float | None, num_bytes: int | None) -> int | None:
    """The option `memory_budget` in bytes: a share of the limit, or a number of its own."""
    if num_bytes is not None:
        return num_bytes
    limit = host_memory.limit_bytes()
    return None if limit is None or share is None else int(limit * share)


def training_bytes(held_bytes: int, new_processes: int = 0) -> int:
    """What ranks that hold so much of a snapshot between them will take for the training.

    Args:
        held_bytes: By all ranks of this host.
        new_processes: Of them, that have imported nothing yet.
    """
    return int(held_bytes * (1 + GRADIENTS)) + new_processes * PROCESS_BYTES


def has_room(place: MemoryPlace, num_bytes: int, training: int = 0) -> bool:
    """Whether so much may be brought into shared memory, what is there already given up for it.

    Args:
        place: The shared memory.
        num_bytes: To be brought.
        training: What the ranks of this host will take beside it.
    """
    taken = place.taken
    room = [place.free_bytes + taken.tmpfs]
    if (budget := budget_bytes(DEFAULT_SHARE, None)) is not None:
        room.append(budget)
    if (available := available_bytes()) is not None:
        room.append(available + sum(taken) - training)
    return num_bytes <= min(room)
