"""How much memory this process may plan with: what the host and its cgroups allow, and have left.

A cgroup lies in others, and each may have a limit: Slurm and systemd limit inner ones, and a
container may see its own as the outermost. What lies on tmpfs is charged to them too. Reserving
more than is left raises no error there: the kernel ends a process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.tiers.memory import MemoryPlace

DEFAULT_SHARE = 0.4
MAX_COPY_THREADS = 4  # more than that memory does not feed
SPARE_BYTES = 64 << 20  # left free for whatever else there is
GRADIENTS = 0.5  # as much of a state: of AdamW's a third, of SGD's with momentum half
PROCESS_BYTES = 256 << 20  # of one that has imported torch and joined a group
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of both versions: limit, what is taken, and what of that the kernel takes back when it needs it.
_LIMIT = ("memory.max", "memory.limit_in_bytes")
_TAKEN = ("memory.current", "memory.usage_in_bytes")
_CACHE = ({"inactive_file", "active_file"}, {"total_inactive_file", "total_active_file"})


def memory_limit_bytes() -> int | None:
    """The smallest limit of the host and of our cgroups; None where none can be read."""
    limits = [_host_bytes(), *(_number(group / _LIMIT[v]) for v, group in _cgroups())]
    return min((limit for limit in limits if limit), default=None)


def available_bytes() -> int | None:
    """What host and cgroups have left for all their processes; None where nobody says."""
    found = [_fields(_PROC / "meminfo", {"MemAvailable:"}) * 1024 or None]
    for version, group in _cgroups():
        limit, taken = _number(group / _LIMIT[version]), _number(group / _TAKEN[version])
        if limit is not None and taken is not None:
            cache = _fields(group / "memory.stat", _CACHE[version])
            found.append(limit - max(taken - cache, 0))
    left = min((each for each in found if each is not None), default=None)
    return None if left is None else max(left - SPARE_BYTES, 0)


def transient_bytes() -> int:
    """What this process has given back since it took most: it may take it again."""
    status = _PROC / "self" / "status"
    return max(_fields(status, {"VmHWM:"}) - _fields(status, {"VmRSS:"}), 0) * 1024


def num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copy_threads(num_ranks: int) -> int:
    """That each of so many ranks of a host may copy with at once: its share of the cores."""
    return min(MAX_COPY_THREADS, max(1, num_cores() // num_ranks))


def budget_bytes(share: float | None, num_bytes: int | None) -> int | None:
    """The option `memory_budget` in bytes: a share of the limit, or a number of its own."""
    if num_bytes is not None:
        return num_bytes
    limit = memory_limit_bytes()
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
    taken = place.num_bytes
    room = [place.free_bytes + taken]
    if (budget := budget_bytes(DEFAULT_SHARE, None)) is not None:
        room.append(budget)
    if (available := available_bytes()) is not None:
        room.append(available + taken - training)
    return num_bytes <= min(room)


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroups() -> Iterator[tuple[int, Path]]:
    """Ours, and those it lies in, as far as they can be seen: 0 or 1 for the version, folder."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        number, controllers, own = [*line.split(":", 2), "", ""][:3]
        version = 0 if number == "0" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if version else _CGROUPS
        folder = root / own.strip("/")  # in a container perhaps not to be seen by this name
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield version, group


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        text = path.read_text().strip()
        return int(text) if text.isdecimal() else None  # "max": none
    return None


def _fields(path: Path, names: set[str]) -> int:
    """The sum of these lines' numbers; 0 where there are none."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in path.read_text().splitlines())
        return sum(int(words[1]) for words in lines if len(words) > 1 and words[0] in names)
    return 0
