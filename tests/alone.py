"""Runs a command where no other test's processes, sockets, mounts or shared memory are: what it
dumps finds its numbers and ports free, and nothing that it starts outlives it. As much of that as
can be had here; nothing of it for a user who may make no namespaces.

    python alone.py COMMAND...
    python alone.py --network COMMAND...    a network of its own, and nothing else
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 18
SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP, IFF_RUNNING = 0x8914, 0x8916, 1, 1 << 6
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def can_find_itself() -> bool:
    """Ranks look for each other by the host's name, and a new network has the loopback alone."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def enter_network() -> None:
    """Leave the network of this process for a new one. It has a second address: with 127.0.0.1
    alone the C library finds none for a server that asks for any, as Slurm's do (AI_ADDRCONFIG)."""
    if can_find_itself() and _libc.unshare(CLONE_NEWNET) == 0:
        second = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, bytes([127, 0, 0, 2]))
        up = struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)
            fcntl.ioctl(any_socket, SIOCSIFADDR, second)


def enter_mounts() -> None:
    """The first process of new numbers sees them in /proc; others' shared memory is out of sight,
    and so are the networks that `ip netns` names."""
    _mount(b"none", b"/", None, MS_REC | MS_PRIVATE)
    _mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for place in ("/dev/shm", "/run/netns"):
        Path(place).mkdir(parents=True, exist_ok=True)
        _mount(b"tmpfs", place.encode(), b"tmpfs", MS_NOSUID | MS_NODEV)


def _mount(source: bytes, place: bytes, kind: bytes | None, flags: int) -> None:
    if _libc.mount(source, place, kind, ctypes.c_ulong(flags), None):
        sys.exit(f"cannot mount {source.decode()} at {place.decode()}")


def be_first(command: list[str]) -> int:
    """Start it, and wait for whoever loses its parent, until it ends.

    Returns:
        Its exit code, or 128 and the number of the signal that it died of.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    enter_mounts()
    pid = os.fork()
    if pid == 0:
        os.execvp(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the command
    while True:
        ended, status = os.wait()
        if ended == pid:
            return _exit_code(status)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main(command: list[str]) -> None:
    if command[0] == "--network":
        enter_network()
        command = command[1:]
    elif _libc.unshare(CLONE_NEWNS | CLONE_NEWPID) == 0:
        enter_network()
        first = os.fork()
        if first == 0:
            os._exit(be_first(command))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(_exit_code(os.waitpid(first, 0)[1]))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
