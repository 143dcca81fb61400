"""Tell which torchrun agent started this rank, and whether it is still there.

torchrun names itself in no variable of its ranks. But each rank leads a session of its own, as a
child of the agent, until the agent is killed: then it is a child of init, or of the process that
takes orphans in. That may have happened before the first look, while the rank imported torch. So a
rank counts as an orphan too if no process above it has torch loaded.

In doubt it is none: a rank that is stopped without need would be stopped again at each start.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trainckpt.attempt.launch import ACCELERATE, TORCHRUN, kind_of_launch

_TORCH = b"libtorch"  # in the names of torch's own libraries, in every build
_NAMES = (b"python", b"torch")  # in the command of an agent
_START_TICKS = 19  # the field of /proc/<pid>/stat, after the name


def agent_pid() -> int | None:
    """Return the process id of this rank's parent, if that can be the agent; None: not known.

    A wrapper that does not `exec` the script leads the session in its place.
    """
    leads = hasattr(os, "getsid") and os.getsid(0) == os.getpid()
    return os.getppid() or None if leads else None


def is_orphan() -> bool:
    """Return True if no process above this one can be an agent."""
    import psutil

    with contextlib.suppress(psutil.Error):
        above = psutil.Process().parents()
        return bool(above) and not any(_may_be_agent(process.pid) for process in above)
    return False


def agent_identity() -> str | None:
    """Return the id and start of this rank's agent, which no other process has had.

    None if that is not known, or if the agent is gone.
    """
    is_rank = kind_of_launch(os.environ) in (TORCHRUN, ACCELERATE)
    pid = agent_pid() if is_rank else None
    if pid is None or is_orphan():
        return None
    with contextlib.suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{pid} {int(fields[_START_TICKS])} {boot}"
    return None


def _may_be_agent(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TORCH in Path(f"/proc/{pid}/maps").read_bytes()
    with contextlib.suppress(OSError):  # another user's
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(name in command for name in _NAMES)
    return True
