"""Memory limits of host and cgroups, and the memory they have left.

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


def left_bytes(process: int | str = SELF) -> int | None:
    """Return the bytes left to the host and to a process's cgroups; None if unknown."""
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
