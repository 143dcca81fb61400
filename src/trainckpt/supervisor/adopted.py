"""A process that this one did not start, and that became its child: the root of a restored tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """What a supervisor wants of the process it looks after."""

    pid: int
    returncode: Any  # as Popen has it: None while it runs

    def poll(self) -> int | None:
        """Its code if it has ended, as `subprocess` has it."""

    def wait(self) -> int:
        """Wait for its end."""


class Adopted:
    """As `subprocess.Popen`, for a child of this process by its id. Any thread.

    Attributes:
        pid: Its id.
        returncode: Its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its code if it has ended."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        while (code := self.poll()) is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return code


@contextlib.contextmanager
def orphans_come_here() -> Iterator[None]:
    """Children of processes that die meanwhile become ours, not the first process's.

    In a container that one may wait for nobody, and then their numbers are never free again.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
