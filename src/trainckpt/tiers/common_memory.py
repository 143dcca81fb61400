"""Common memory: a memfd that several processes of one user map; each writes a part, all read.

It has no file system and no name, and pages are made as they are written. Others open it by what
one of them tells (`memfd.Target`), as long as that one has it open. Its pages are made with their
content where the system does that (`fresh_memory`), else it is written rather than mapped: pages
that are written whole are not cleared first, but only one process at a time writes.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import memfd
from trainckpt.tiers.direct import address
from trainckpt.tiers.fresh_memory import fill, make
from trainckpt.tiers.mapped import Mapped

_OVERCOMMIT, _NEVER = Path("/proc/sys/vm/overcommit_memory"), "2"


class CommonMemory:
    """A memfd; close it when it is mapped, or not needed.

    Attributes:
        target: By which others open it.
    """

    def __init__(self, descriptor: int, target: memfd.Target) -> None:
        self.target = target
        self._descriptor = descriptor

    @classmethod
    def make(cls) -> CommonMemory:
        """A new one; raises `OSError` as the system reports it."""
        if not memfd.is_available() or _is_accounted_strictly():
            raise OSError("this system has no memory without a file system, or no pages to spare")
        descriptor, token = memfd.make()
        return cls(descriptor, memfd.Target(token, os.getpid(), descriptor))

    @classmethod
    def opened(cls, told: str) -> CommonMemory:
        """That of another process, by its target; raises `OSError` if it is not to be had."""
        target = memfd.Target.parse(told)
        descriptor = memfd.open_held(target, os.O_RDWR) if target is not None else None
        if target is None or descriptor is None:
            raise OSError(f"there is no such memory: {told[:100]!r}")
        return cls(descriptor, target)

    def mapped(self, num_bytes: int) -> memoryview:
        """So much of it, to be written with `put`. It stays as long as anybody has a view.

        Raises:
            OSError: as the system reports it.
        """
        # Nobody makes it shorter, whatever others think of its length: behind the end of a file
        # there is no memory (SIGBUS).
        if os.fstat(self._descriptor).st_size <= num_bytes:
            os.pwrite(self._descriptor, b"\0", num_bytes)
        return memoryview(_Common(os.dup(self._descriptor), num_bytes))

    def close(self) -> None:
        """Nothing is opened or mapped any more; what was mapped stays."""
        os.close(self._descriptor)


class _Common(Mapped):
    def __new__(cls, descriptor: int, num_bytes: int) -> _Common:
        try:
            mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(descriptor)
            raise
        assert isinstance(mapping, cls)
        return mapping

    def bring(self, into: memoryview, data: memoryview) -> None:
        make(into, data, self._write)

    def _write(self, into: memoryview, data: memoryview) -> None:
        whole = memoryview(self)
        at = (address(into) or 0) - (address(whole) or 0)
        while len(data):
            try:
                done = os.pwrite(self._descriptor, data, at)
            except OSError as error:  # no fault of the file that is being read
                what = f"memory for all ranks of this host cannot be had: {error.strerror}"
                raise UnusableSnapshot(what) from error
            at, data = at + done, data[done:]


def _is_accounted_strictly() -> bool:
    """Whether memory is only there that is set aside: to touch other pages ends the process."""
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == _NEVER
    except OSError:
        return True


def put(into: memoryview, data: memoryview) -> None:
    """`into[:] = data`, the quickest way there is to that memory, while other threads run.

    Raises:
        UnusableSnapshot: there is not so much memory, if that is common.
    """
    memory = into.obj
    if isinstance(memory, _Common) and len(into) == len(data):
        memory.bring(into, data)
    else:
        fill(into, data)
