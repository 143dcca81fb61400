"""Processes of a number that a test wants."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import tempfile
from pathlib import Path

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
LOCK = Path(tempfile.gettempdir()) / "trainckpt-tests-last-pid.lock"


@contextlib.contextmanager
def next_is(number):
    """What is started next has this number, or a later one; no other test moves it meanwhile."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LAST_PID.write_text(str(number - 1))
        yield


def with_number(pid, besides=()):
    """A process of this number; whoever starts next gets none of `besides`, which come soon."""
    for _ in range(1000):
        with next_is(pid):
            process = subprocess.Popen(["sleep", "600"])
            LAST_PID.write_text(str(max([pid, *besides]) + 1))
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"{pid} is not to be had")
