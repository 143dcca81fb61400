"""Read the limits of host and cgroups, the memory free within them, and the cores of this process.

Cgroups are nested, and each may have a limit: Slurm and systemd limit inner ones, and a container
may see its own as the outermost. Files on tmpfs count too. Using more than is left raises no error:
the kernel kills a process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.storage.shared_memory import SharedMemoryDir


SELF = "self"
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# For cgroup versions 2 and 1: limit, usage, and the reclaimable part of the usage.
_LIMIT = ("memory.max", "memory.limit_in_bytes")
_TAKEN = ("memory.current", "memory.usage_in_bytes")
_CACHE = ({"inactive_file", "active_file"}, {"total_inactive_file", "total_active_file"})


def limit_bytes() -> int | None:
    """Return the smallest limit of the host and this process's cgroups; None if unreadable."""
    limits = [_host_bytes(), *(_number(group / _LIMIT[v]) for v, group in _cgroups(SELF))]
    return min((limit for limit in limits if limit), default=None)


def free_bytes(process: int | str = SELF) -> int | None:
    """Return the bytes free for the host and to a process's cgroups; None if unknown."""
    found = [fields(_PROC / "meminfo", {"MemAvailable:"}) * 1024 or None]
    for version, group in _cgroups(process):
        limit, taken = _number(group / _LIMIT[version]), _number(group / _TAKEN[version])
        if limit is not None and taken is not None:
            cache = fields(group / "memory.stat", _CACHE[version])
            found.append(limit - max(taken - cache, 0))
    left = min((each for each in found if each is not None), default=None)
    return None if left is None else max(left, 0)


def transient_bytes() -> int:
    """Return the bytes this process has freed since its peak: it may need them again."""
    status = _PROC / SELF / "status"
    return max(fields(status, {"VmHWM:"}) - fields(status, {"VmRSS:"}), 0) * 1024


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroups(process: int | str) -> Iterator[tuple[int, Path]]:
    """Yield a process's cgroup and those around it, if visible: (0 for v2, 1 for v1), folder."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        found = (_PROC / str(process) / "cgroup").read_bytes()
        lines = os.fsdecode(found).splitlines()
    for line in lines:
        number, controllers, own = [*line.split(":", 2), "", ""][:3]
        version = 0 if number == "0" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if version else _CGROUPS
        folder = root / own.strip("/")  # may not exist under this name in a container
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield version, group


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        text = path.read_text().strip()
        return int(text) if text.isdecimal() else None  # "max": no limit
    return None


def fields(path: Path, names: set[str]) -> int:
    """Return the sum of these lines' numbers; 0 without such lines."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in path.read_text().splitlines())
        return sum(int(words[1]) for words in lines if len(words) > 1 and words[0] in names)
    return 0


# ---- shares for saves and resumes


DEFAULT_SHARE = 0.4
MAX_COPY_THREADS = 4  # more than that memory does not feed
SPARE_BYTES = 64 << 20  # left free for whatever else there is
GRADIENTS = 0.5  # share of the state: of AdamW's a third, of SGD's with momentum half
PROCESS_BYTES = 256 << 20  # of a process that has imported torch and joined a group


def available_bytes() -> int | None:
    """Return the bytes that host and cgroups have left for all their processes; None if unknown."""
    left = free_bytes()
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
    limit = limit_bytes()
    return None if limit is None or share is None else int(limit * share)


def training_bytes(held_bytes: int, new_processes: int = 0) -> int:
    """Return the bytes of memory that ranks will need for training, from their snapshot's size.

    Args:
        held_bytes: Bytes of the snapshot held by all ranks of this host.
        new_processes: Number of ranks that have imported nothing yet.
    """
    return int(held_bytes * (1 + GRADIENTS)) + new_processes * PROCESS_BYTES


def has_room(memory_dir: SharedMemoryDir, num_bytes: int, training: int = 0) -> bool:
    """Return True if so much fits into shared memory, in place of this run's present content.

    Args:
        memory_dir: The shared memory.
        num_bytes: Bytes to add.
        training: Bytes that the ranks of this host will need beside it.
    """
    taken = memory_dir.num_bytes
    room = [memory_dir.free_bytes + taken]
    if (budget := budget_bytes(DEFAULT_SHARE, None)) is not None:
        room.append(budget)
    if (available := available_bytes()) is not None:
        room.append(available + taken - training)
    return num_bytes <= min(room)
