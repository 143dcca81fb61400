"""Processes of a number that a test wants."""

from __future__ import annotations

import subprocess
from pathlib import Path

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def with_number(pid):
    """A process of this number."""
    for _ in range(1000):
        LAST_PID.write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "600"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"{pid} is not to be had")
