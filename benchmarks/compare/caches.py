"""What makes a second time faster than the first: forgotten, without being root.

The page cache holds files, and the C library what this process has freed: a process that was just
started, as one is that resumes, has neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

_TOUCH = """
import os, sys
from trainckpt.tiers.direct import memory, populate
os._exit(not populate(memory(int(sys.argv[1]))))
"""


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


def have_memory(num_bytes: int) -> None:
    """Let so much free memory be the machine's own for the next seconds.

    A virtual machine that gives free memory back to its host has each page fetched again: 3 s per
    GB on the machine this was written on, where to make pages of what it has takes a tenth of that.
    """
    subprocess.run([sys.executable, "-c", _TOUCH, str(num_bytes)], check=True)
