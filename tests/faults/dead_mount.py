"""A mount whose server is dead: FUSE without anybody behind it, as a network file system goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)


def why_not():
    """Why this machine cannot hold one, or ""."""
    if os.geteuid() != 0:
        return "mounting needs root"
    return "" if Path("/dev/fuse").exists() else "the kernel has no FUSE"


@contextlib.contextmanager
def dead_mount(folder):
    """Whatever asks for anything under `folder` waits for ever; yields what ends the waiting.

    After it was called every access is refused with ENOTCONN, as when a server is known to be gone.
    """
    folder.mkdir()
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0".encode()
    if LIBC.mount(b"dead", str(folder).encode(), b"fuse", 0, options):
        number = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(number, os.strerror(number))
    closed = []

    def disconnect():
        if not closed:
            closed.append(True)
            os.close(descriptor)

    try:
        yield disconnect
    finally:
        disconnect()
        LIBC.umount2(str(folder).encode(), 2)  # MNT_DETACH
