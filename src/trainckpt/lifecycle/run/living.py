"""Whether a process of this host lives. One that has ended, and that nobody has waited for, does
not, although a signal to it is no error.

Used by: attempt_number.py, dumping/rest_told.py, resuming/still_alive.py, supervisor/processes.py.
"""

from __future__ import annotations

import os
from pathlib import Path

ENDED = "ZX"  # a zombie, or dead: proc_pid_stat(5)


def lives(pid: int) -> bool:
    """Whether it does; where that cannot be told, it is taken to.

    Args:
        pid: Of a process, above 0.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or no number of a process
        return False
    except OSError:
        pass  # another user's
    return _state(pid) not in ENDED


def _state(pid: int) -> str:
    """A letter; "?" where nothing tells it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "?"
    return text.rpartition(")")[2].strip()[:1] or "?"
