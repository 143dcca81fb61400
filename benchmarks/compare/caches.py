"""What makes a second time faster than the first: forgotten, mostly without being root.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEEP = """
import ctypes, sys
from trainckpt.storage.direct_io import address, populate, private_memory
from trainckpt.storage.libc import libc
NO_LARGE_PAGES, NOT_NEEDED, PAGE, STEP = 15, 4, 4096, 1 << 20
size = int(sys.argv[1])
block = private_memory(size)
def advise(at, end, how):
    where = ctypes.c_void_p(address(block) + at)
    return libc().madvise(where, ctypes.c_size_t(end - at), ctypes.c_int(how))
advise(0, size, NO_LARGE_PAGES)
had = populate(block)
for at in range(0, size, STEP):
    advise(at + PAGE, min(at + STEP, size), NOT_NEEDED)
print(had, flush=True)
sys.stdin.read()
"""
PAGE_BYTES = 4096


def evict(path: Path) -> None:
    """Of a file, or of all files of a folder."""
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.is_file():
            file = os.open(each, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def evict_all() -> None:
    """Whatever the page cache holds, modules of programs too: as a machine that was just started.

    Raises:
        PermissionError: only root may.
    """
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


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


@contextlib.contextmanager
def memory_kept(num_bytes: int) -> Iterator[None]:
    """Inside, so much free memory is the machine's own.

    A virtual machine that gives free memory back to its host has each page fetched again: 3 s per
    GB on the machine this was written on, where to make pages of what it has takes a tenth of that.
    What is given back are whole 2 MiB; so a process holds one page of each MiB. None of that memory
    is to be had in large pages, then.

    Raises:
        RuntimeError: there is not so much.
    """
    size = num_bytes // PAGE_BYTES * PAGE_BYTES
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEP, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper, keeper.stdin:
        if keeper.stdout.readline().strip() != "True":
            raise RuntimeError(f"this machine has no {num_bytes / 1e9:.1f} GB of free memory")
        yield
