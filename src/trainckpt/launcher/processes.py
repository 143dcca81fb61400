"""Find and end the processes of a launch on this host, restored ones included.

torchrun puts its ranks into sessions of their own, so the members of a launch are found by their
parents, and orphans by the variable that they inherited. Nothing here raises for a process that is
gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, namespace_of
from trainckpt.process_dump.process_tree import processes as tree
from trainckpt.process_dump.process_tree import send
from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


KILL_ROUNDS, KILL_ROUND_S = 50, 0.02
QUIET_ROUNDS = 2  # without any: what is just being executed has no environment for a moment
CLOCKS_DIFFER_S = 1.0


def living(pid: int) -> psutil.Process | None:
    """Return the process; None if it has ended, whether or not its parent has waited for it.

    Two of one id are equal only if they are one process: ids are given again.
    """
    process = _process(pid)
    try:
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if process is None or process.status() in ended else process
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return process


def is_ours(process: psutil.Process, folder: str, reported_at: float) -> bool:
    """Return True if it is still the process that reported itself at that time.

    An id can be given to another process. Programs that set their title overwrite the environment
    that the system shows; then the time of their start decides.
    """
    mark = environment(process.pid).get(SUPERVISOR_VARIABLE)
    if mark is not None:
        return mark == folder
    if process.pid <= 1:  # a launcher is none of the ranks
        return False
    return bool(process.create_time() <= reported_at + CLOCKS_DIFFER_S)


def seen_from_here(number: int, namespace: str, ancestor: int) -> int | None:
    """Return the id of `ancestor` or its descendant with this id in that pid namespace, or None."""
    for pid in tree(ancestor):
        # NSpid: the ids in each of its namespaces, the outermost first
        ids = [line.split()[-1] for line in _status(pid) if line.startswith("NSpid:")]
        if ids == [str(number)] and namespace_of(pid) == namespace:
            return pid
    return None


def environment(pid: int) -> dict[str, str]:
    """Return the variables a process was started with; none if that cannot be seen."""
    process = _process(pid)
    with contextlib.suppress(psutil.Error, OSError):
        return dict(process.environ()) if process is not None else {}
    return {}


def children(parent: int) -> list[int]:
    """Return the children of a process, also those that have ended and were not waited for."""
    process = _process(parent)
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in process.children()] if process is not None else []
    return []


def handles(pid: int, number: int) -> bool:
    """Return True if a process handles or ignores a signal."""
    masks = [
        int(line.split()[1], 16) for line in _status(pid) if line.startswith(("SigCgt:", "SigIgn:"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)


def child_above(pid: int, ancestor: int) -> int:
    """Return the child of `ancestor` that `pid` descends from, or is; `pid` if there is none."""
    process = _process(pid)
    with contextlib.suppress(psutil.Error):
        for each in [process, *process.parents()] if process is not None else []:
            if each.ppid() == ancestor:
                return int(each.pid)
    return pid


def kill_all(process: Process, folder: str, reported: Iterable[int] = ()) -> None:
    """Kill a launched process, its descendants, and orphans of the launch.

    Args:
        process: The launched process; it may be gone.
        folder: The value of TRAINCKPT_SUPERVISOR in its environment, or "".
        reported: Process ids reported by ranks.
    """
    reported_pids = tuple(reported)
    quiet_rounds = 0
    for _ in range(KILL_ROUNDS):  # a process may be forking while the list is made
        leader = [process.pid] if process.returncode is None else []
        members = _members([*leader, *reported_pids], folder)
        send(members, signal.SIGKILL)
        quiet_rounds = 0 if members else quiet_rounds + 1
        if quiet_rounds == QUIET_ROUNDS:
            break
        time.sleep(KILL_ROUND_S)
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_session(process: Process) -> None:
    """End the launched process and all it started, as the loss of a host would."""
    kill_all(process, environment(process.pid).get(SUPERVISOR_VARIABLE, ""))


def _members(leaders: Iterable[int], folder: str) -> list[int]:
    """Return living processes that descend from `leaders`, or whose environment holds `folder`."""
    pids = {pid for leader in leaders for pid in tree(leader)}
    for pid in psutil.pids() if folder else ():
        if pid not in pids and environment(pid).get(SUPERVISOR_VARIABLE) == folder:
            pids.update(tree(pid))
    return sorted(pid for pid in pids - {os.getpid()} if living(pid) is not None)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError, OverflowError):
        return None


def _status(pid: int) -> list[str]:
    """Return the lines of a process's status; none if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """Process under supervision: a `subprocess.Popen` or a `ReparentedProcess`."""

    pid: int
    returncode: Any  # as Popen has it: None while it runs

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess` gives it, or None while it runs."""

    def wait(self) -> int:
        """Wait for the end."""


class ReparentedProcess:
    """Root of a restored tree: a child that this process did not start. Any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative for a signal; None while it runs
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
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
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc().prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
