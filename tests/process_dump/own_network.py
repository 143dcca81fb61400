"""Runs a command in a network of its own, so that no other test's sockets get the ports of what it
dumps. Where that cannot be had, or ranks would not find each other there, in this one.

    python own_network.py COMMAND...
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWNET, SIOCSIFFLAGS = 0x40000000, 0x8914
IFF_UP, IFF_RUNNING = 1, 1 << 6


def can_find_itself():
    """Ranks look for each other by the host's name, and a new network has the loopback alone."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def enter():
    """Leave the network of this process for a new one."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)


if __name__ == "__main__":
    if can_find_itself():
        enter()
    os.execvp(sys.argv[1], sys.argv[1:])
