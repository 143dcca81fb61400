"""What /proc shows of a process's GPUs: device files, NCCL, a signal's stop.

Signs, not proofs. Nothing here shows managed memory: every process that uses CUDA maps
/dev/nvidia-uvm, once or many times. Nor does it show memory that processes share by CUDA's own
handles. Both are left to the driver, which refuses to checkpoint them (`gpus.set_aside`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.process_dump.gpus import Signs
from trainckpt.process_dump.tree import GPU_FILES

if TYPE_CHECKING:
    from collections.abc import Iterable

PROC = Path("/proc")
DEVICES = GPU_FILES
# torch gives each process group of NCCL's such a thread, from its making to its end.
NCCL_THREADS = ("pt_nccl_watchdg", "pt_nccl_heartbt")
NVLS = "NCCL_NVLS_ENABLE"  # with the NVLink switch in use no dump can be brought back
STOPPED, GONE = "Tt", "ZX"


def look(pids: Iterable[int]) -> list[Signs]:
    """The signs of those processes that have any GPU."""
    return [signs for pid in pids if (signs := of(pid)).holds]


def of(pid: int) -> Signs:
    """The signs of one process."""
    return Signs(
        pid,
        holds=_has_mapped(pid) or _has_open(pid),
        nccl=any(name in NCCL_THREADS for name in _threads(pid)),
        stopped=_state(pid) in STOPPED,
    )


def holders(pids: Iterable[int]) -> list[int]:
    """Those that have a GPU's device file open or mapped."""
    return [pid for pid in pids if _has_open(pid) or _has_mapped(pid)]


def gone(pids: Iterable[int]) -> list[int]:
    """Those that have ended."""
    return [pid for pid in pids if _state(pid) in GONE]


def _has_open(pid: int) -> bool:
    folder = PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):  # noqa: PTH208 - thousands of them
            with contextlib.suppress(OSError):
                if os.readlink(folder / number).startswith(DEVICES):  # noqa: PTH115 - a text
                    return True
    return False


def _has_mapped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
        paths = (line[line.find("/") :] for line in lines.splitlines())
        return any(path.startswith(DEVICES) for path in paths)
    return False


def _threads(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found.append((task / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return found


def _state(pid: int) -> str:
    """The letter of /proc's stat; "X" where there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    return "X"
