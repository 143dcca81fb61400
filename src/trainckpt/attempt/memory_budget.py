"""Memory available to this process, by the limits and the use of host and cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.storage import host_memory

if TYPE_CHECKING:
    from trainckpt.storage.shared_memory import SharedMemoryDir

DEFAULT_SHARE = 0.4
MAX_COPY_THREADS = 4  # more than that memory does not feed
SPARE_BYTES = 64 << 20  # left free for whatever else there is
GRADIENTS = 0.5  # share of the state: of AdamW's a third, of SGD's with momentum half
PROCESS_BYTES = 256 << 20  # of a process that has imported torch and joined a group


def available_bytes() -> int | None:
    """Return the bytes that host and cgroups have left for all their processes; None if unknown."""
    left = host_memory.left_bytes()
    return None if left is None else max(left - SPARE_BYTES, 0)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copy_threads(num_ranks: int, *, beside_training: bool = False) -> int:
    """Return the number of threads with which each rank of a host may copy: its share of the cores.

    Beside training one less, for the thread that trains: else both take turns at a core, and a step
    loses the time its copy gains.
    """
    share = num_cores() // num_ranks - beside_training
    return min(MAX_COPY_THREADS, max(1, share))


def budget_bytes(share: float | None, num_bytes: int | None) -> int | None:
    """Return the option `memory_budget` in bytes: a share of the limit, or its own number."""
    if num_bytes is not None:
        return num_bytes
    limit = host_memory.limit_bytes()
    return None if limit is None or share is None else int(limit * share)


def training_bytes(held_bytes: int, new_processes: int = 0) -> int:
    """Return the bytes of memory that ranks will need for training, from their snapshot's size.

    Args:
        held_bytes: Bytes of the snapshot held by all ranks of this host.
        new_processes: Number of ranks that have imported nothing yet.
    """
    return int(held_bytes * (1 + GRADIENTS)) + new_processes * PROCESS_BYTES


def has_room(place: SharedMemoryDir, num_bytes: int, training: int = 0) -> bool:
    """Return True if so much fits into shared memory, in place of this run's present content.

    Args:
        place: The shared memory.
        num_bytes: Bytes to add.
        training: Bytes that the ranks of this host will need beside it.
    """
    taken = place.num_bytes
    room = [place.free_bytes + taken]
    if (budget := budget_bytes(DEFAULT_SHARE, None)) is not None:
        room.append(budget)
    if (available := available_bytes()) is not None:
        room.append(available + taken - training)
    return num_bytes <= min(room)
