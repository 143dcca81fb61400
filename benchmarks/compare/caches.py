"""What makes a second time faster than the first: forgotten, without being root.

The page cache holds files, and the C library what this process has freed: a process that was just
started, as one is that resumes, has neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path


def evict(path: Path) -> None:
    """Of a file, or of all files of a folder."""
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.is_file():
            file = os.open(each, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def give_back() -> None:
    """Give the system the memory that this process has freed, where the C library can (glibc)."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Let what this process has taken at most be what it takes now (Linux).

    Who looks at it plans for what training takes; a system that had its turn before is no part of
    that.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
