"""Guard of a dump: frees the stopped tree if its supervisor is killed before the dump is over.

CRIU leaves the tree stopped. Without its supervisor it would stay stopped for ever, with all its
memory. The guard is a process beside both. It waits until supervisor and CRIU are gone, and then
lets the tree go on and deletes the images; or ends the tree, if the record stands, or if the tree
could not go on.

`guarded` and `free` are for the supervisor. The rest is the process: standard library only, run by
its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OVER = b"x"
TCP_REPAIR = 19  # option of TCP sockets, in linux/tcp.h
PIDFD_GETFD = 438  # system call, since Linux 5.6


@contextlib.contextmanager
def guarded(root: int, mark: str, record: Path, *, may_go_on: bool = True) -> Iterator[int]:
    """Guard the dump of a tree in the block; yield a descriptor for CRIU to keep open.

    Args:
        root: Process id of the tree's root.
        mark: "NAME=value" in the environment of all processes of the tree.
        record: Path of the dump's record, in the folder of the dump.
        may_go_on: Without its supervisor the tree may go on. Else it is ended.

    Raises:
        OSError: the guard cannot be started.
    """
    guard_end, own_end = os.pipe()
    try:
        words = [str(guard_end), str(root), mark, str(record), "on" if may_go_on else "end"]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            pass_fds=(guard_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
            cwd="/",
        )
    except OSError:
        os.close(own_end)
        raise
    finally:
        os.close(guard_end)
    try:
        yield own_end
    finally:
        with contextlib.suppress(BrokenPipeError):  # the guard was ended
            os.write(own_end, OVER)
        os.close(own_end)
        guard.wait()


def free(pids: Iterable[int]) -> None:
    """Let processes that CRIU left stopped go on, with their connections as before the dump.

    CRIU leaves connections in repair mode, where they close silently, and fail to send or receive.
    """
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            _end_repair(pid)
    _send(pids, signal.SIGCONT)


def _end_repair(pid: int) -> None:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    process = os.pidfd_open(pid)
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115 - text, no path
                if not link.startswith("socket:"):
                    continue
                if (copy := syscall(PIDFD_GETFD, process, int(number), 0)) < 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                with socket.socket(fileno=copy) as found:
                    if found.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR) == 1:
                        found.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
                        # the end of repair mode resets it; a server's next start needs it
                        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    finally:
        os.close(process)


def members(root: int, mark: str) -> list[int]:
    """Return `root`, its descendants, and all other processes with the mark."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    parent_by_pid = {pid: _parent(pid) for pid in pids}
    found = {pid for pid in pids if pid == root or _has(pid, mark)} - {os.getpid()}
    while new := {pid for pid in pids if parent_by_pid[pid] in found} - found:
        found |= new
    return sorted(found)


def _has(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return os.fsencode(mark) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return None


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stand_in(root: int, mark: str, record: Path, *, may_go_on: bool) -> None:
    """Do what the supervisor cannot do any more."""
    if record.exists():  # whole, since it was renamed; its name may not be on the disk yet
        with contextlib.suppress(OSError):
            folder = os.open(record.parent, os.O_RDONLY)
            os.fsync(folder)
        _send(members(root, mark), signal.SIGKILL)
        return
    if may_go_on:
        free(members(root, mark))
    else:
        _send(members(root, mark), signal.SIGKILL)
    shutil.rmtree(record.parent, ignore_errors=True)


def main(arguments: list[str]) -> None:
    """Wait for the end of the dump, or of supervisor and CRIU."""
    pipe, root, mark, record, otherwise = arguments
    if os.read(int(pipe), 1) != OVER:
        _stand_in(int(root), mark, Path(record), may_go_on=otherwise == "on")


if __name__ == "__main__":
    main(sys.argv[1:])
