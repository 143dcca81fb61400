"""A page of numbers that outlives its process: what a rank counted until it was killed.

    <memory folder of the run>/counters-<n>    numbers of one attempt, each 8 bytes

A write is a store to mapped memory, without a system call. The kernel keeps the page on tmpfs when
the process is killed, for the supervisor or the next attempt on this host. Without such memory the
numbers lie in the process alone.

The page's bytes are reserved before they are touched, and a forked child gets a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import weakref
from array import array
from typing import TYPE_CHECKING

from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from pathlib import Path

NUM_BYTES = mmap.PAGESIZE
NUMBERS = 32  # in use
_ITEM_BYTES = 8
_NAME = re.compile(r"counters-(\d{1,9})")
# A pipe in place of the page must not block.
_NO_FOLLOW = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
)


class CounterPage:
    """Numbers of one attempt. One writer; any thread may read.

    Attributes:
        numbers: The numbers, as doubles. Another object after `share`.
    """

    def __init__(self) -> None:
        self.numbers: memoryview[float] = (
            memoryview(array("d", [0.0] * NUMBERS)).cast("B").cast("d")
        )
        self._path: Path | None = None
        _pages.add(self)

    def share(self, run: str, attempt: int) -> None:
        """Keep the numbers in shared memory from now on, if possible; remove older pages."""
        _remove_before(run, attempt)
        memory_dir = SharedMemoryDir.of(run)
        if memory_dir is None:
            return
        path = memory_dir.root / f"counters-{attempt}"
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, NUM_BYTES)
                mapped = memoryview(mmap.mmap(descriptor, NUM_BYTES)).cast("d")
            finally:
                os.close(descriptor)
            mapped[:NUMBERS] = self.numbers
            self.numbers, self._path = mapped, path

    def detach(self) -> None:
        """Go on in this process's own memory; the page stays as it is."""
        own = array("d", self.numbers[:NUMBERS])
        self.numbers, self._path = memoryview(own).cast("B").cast("d"), None

    def close(self) -> None:
        """Remove the page: the numbers stand elsewhere by now."""
        path = self._path
        if path is not None:
            self.detach()
            with contextlib.suppress(OSError):
                path.unlink()


def read_page(run: str, attempt: int) -> list[float] | None:
    """Return the numbers that an attempt on this host has left; None if there are none."""
    memory_dir = SharedMemoryDir.found(run)
    if memory_dir is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(memory_dir.root / f"counters-{attempt}", os.O_RDONLY | _NO_FOLLOW)
        try:
            data = os.read(descriptor, NUMBERS * _ITEM_BYTES)
        finally:
            os.close(descriptor)
        return list(memoryview(data).cast("d"))
    return None


def _remove_before(run: str, attempt: int) -> None:
    memory_dir = SharedMemoryDir.found(run)
    if memory_dir is None:
        return
    with contextlib.suppress(OSError):
        for path in memory_dir.root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) < attempt:
                path.unlink(missing_ok=True)


_pages: weakref.WeakSet[CounterPage] = weakref.WeakSet()


def _forked() -> None:
    for page in list(_pages):
        page.detach()  # a child that trains something counts for itself


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
