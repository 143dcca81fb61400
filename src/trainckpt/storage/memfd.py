"""Memory outside any file system, for hosts with a small /dev/shm: no mount limits a memfd.

It has no name, and lives as long as a process has it open.
"""

from __future__ import annotations

import errno
import os

_NAME = "trainckpt"  # as /proc shows it
_NO_EXEC = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3: the memory holds data only


def is_available() -> bool:
    """Return True if the system has memfds."""
    return hasattr(os, "memfd_create")


def make() -> int:
    """Make an empty memfd in this process; return its descriptor.

    Raises:
        OSError: as the system reports it.
    """
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | _NO_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor
