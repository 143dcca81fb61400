"""Guard of a dump: frees the stopped tree if its supervisor is killed before the dump is over.

CRIU leaves the tree stopped. Without its supervisor it would stay stopped for ever, with all its
memory. The guard is a process beside both. It waits until supervisor and CRIU are gone. If the
record is committed, or the tree cannot run without its supervisor, the guard ends the tree; else it
lets the tree go on, and deletes the images.

`guarded` and `resume_tree` are for the supervisor. The rest is the process: standard library only,
run by its path.
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

READY, OVER = b"r", b"x"
TCP_REPAIR = 19  # option of TCP sockets, in linux/tcp.h
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls, since Linux 5.6; some Pythons lack the first


@contextlib.contextmanager
def guarded(root: int, mark: str, record: Path, *, may_go_on: bool = True) -> Iterator[int]:
    """Guard the dump of a tree in the block; yield a descriptor for CRIU to keep open.

    Args:
        root: Process id of the tree's root.
        mark: "NAME=value" in the environment of all processes of the tree.
        record: Path of the dump's record, in the folder of the dump.
        may_go_on: The tree can run without its supervisor.

    Raises:
        OSError: the guard cannot be started.
    """
    guard_end, own_end = os.pipe()
    name, _, value = mark.partition("=")
    # without the mark, it is none of the tree; a Python may need the rest, as LD_LIBRARY_PATH
    environment = {k: v for k, v in os.environ.items() if (k, v) != (name, value)}
    try:
        words = [str(guard_end), str(root), mark, str(record), "on" if may_go_on else "end"]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            pass_fds=(guard_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        assert guard.stdout is not None
        with guard.stdout:
            if guard.stdout.read() != READY:
                raise ChildProcessError(f"the guard of the dump ended with {guard.wait()}")
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


def resume_tree(pids: Iterable[int]) -> None:
    """Let processes that CRIU left stopped go on, with their connections as before the dump.

    CRIU leaves connections in repair mode, where they close silently, and fail to send or receive.
    """
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(Exception):  # whatever fails, none may stay stopped
            _end_repair(pid)
    _send(pids, signal.SIGCONT)


def _end_repair(pid: int) -> None:
    process = _syscall(PIDFD_OPEN, pid, 0)
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115 - text, no path
                if not link.startswith("socket:"):
                    continue
                copy = _syscall(PIDFD_GETFD, process, int(number), 0)
                with socket.socket(fileno=copy) as found:
                    if found.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR) == 1:
                        found.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
                        # the end of repair mode resets it; a server's next start needs it
                        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    finally:
        os.close(process)


def _syscall(number: int, *arguments: int) -> int:
    """Return the descriptor that a system call makes; raise its `OSError`."""
    made: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if made < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return made


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
        resume_tree(members(root, mark))
    else:
        _send(members(root, mark), signal.SIGKILL)
    shutil.rmtree(record.parent, ignore_errors=True)


def main(arguments: list[str]) -> None:
    """Wait for the end of the dump, or of supervisor and CRIU."""
    pipe, root, mark, record, otherwise = arguments
    os.write(1, READY)
    os.close(1)
    if os.read(int(pipe), 1) != OVER:
        _stand_in(int(root), mark, Path(record), may_go_on=otherwise == "on")


if __name__ == "__main__":
    main(sys.argv[1:])
