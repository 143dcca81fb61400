"""Drop memory from a dump if a snapshot has its contents, and refill it later.

    drop     digests each tensor's bytes; then returns its pages to the kernel
    filled   compares the digests

Addresses stay the same, so views, optimizers and other users of the tensors notice nothing, as long
as nothing reads them in between. Only whole pages inside contiguous CPU tensors in private
anonymous memory are dropped. Their edges stay, and so does shared or locked memory.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.digest import digest
from trainckpt.state.destination import Destination
from trainckpt.state.staging import TYPES, bytes_of
from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from trainckpt.format.layout import Box
    from trainckpt.state.captured import Captured

LEAST_BYTES = 32 << 10  # smaller tensors stay
MADV_DONTNEED = 4
MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class DroppedMemory:
    """The dropped tensors, to be refilled.

    Attributes:
        tensors: Name -> the live tensor.
        wanted: Name -> its box of the whole tensor; None: all of it.
        digests: Name -> digest of its bytes before the drop.
        num_bytes: Bytes returned to the kernel.
    """

    tensors: dict[str, torch.Tensor]
    wanted: dict[str, Box | None]
    digests: dict[str, str]
    num_bytes: int

    def destination(self) -> Destination:
        """Return a destination to restore into these very tensors."""
        return Destination(self.wanted, into=self.tensors)

    def filled(self) -> None:
        """Raise `UnusableSnapshot` unless every byte is as before the drop."""
        other = [n for n, t in self.tensors.items() if digest(bytes_of(t)) != self.digests[n]]
        if other:
            raise UnusableSnapshot(f"not what it was before the dump: {', '.join(other[:5])[:300]}")


def drop(captured: Captured, stored: Collection[str]) -> DroppedMemory:
    """Drop the memory of the tensors named in `stored`, equal to the stored ones.

    Nothing may read it until it is refilled.
    """
    private = _Private()
    tensors, digests, ranges = {}, {}, []
    for name, tensor in captured.tensors.items():
        if name in stored and _is_droppable(tensor):
            begin, end = _pages(tensor.data_ptr(), tensor.nbytes)
            if begin < end and private.holds(begin, end):
                tensors[name], digests[name] = tensor, digest(bytes_of(tensor))
                ranges.append((begin, end))
    dropped = sum(end - begin for begin, end in ranges if _give_back(begin, end))
    _trim()
    boxes = {
        name: captured.placed[name].box if name in captured.placed else None for name in tensors
    }
    return DroppedMemory(tensors, boxes, digests, dropped)


def discard(memory: memoryview) -> None:
    """Return the pages of unused memory to the kernel."""
    if len(memory):
        first = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        begin, end = _pages(first, len(memory))
        if begin < end and _Private().holds(begin, end):
            _give_back(begin, end)


class _Private:
    """Address ranges of this process's private anonymous memory."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        try:
            lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            reach, rights, _, _, inode = line.split(maxsplit=5)[:5]
            begin, end = (int(each, 16) for each in reach.split("-"))
            if rights == "rw-p" and inode == "0":
                if self._ends and self._ends[-1] == begin:
                    self._ends[-1] = end
                else:
                    self._begins.append(begin)
                    self._ends.append(end)

    def holds(self, begin: int, end: int) -> bool:
        at = bisect.bisect_right(self._begins, begin) - 1
        return at >= 0 and end <= self._ends[at]


def _is_droppable(tensor: torch.Tensor) -> bool:
    large = tensor.nbytes >= LEAST_BYTES and tensor.device.type == "cpu"
    return large and tensor.is_contiguous() and tensor.dtype in TYPES.values()


def _pages(first: int, num_bytes: int) -> tuple[int, int]:
    """Return begin and end of the whole pages inside a range."""
    page = mmap.PAGESIZE
    return -(-first // page) * page, (first + num_bytes) // page * page


def _give_back(begin: int, end: int) -> bool:
    """Return False if the kernel refuses, as it does for locked memory."""
    return bool(libc().madvise(begin, end - begin, MADV_DONTNEED) == 0)


def _trim() -> None:
    """Return freed memory from malloc to the kernel."""
    trim = getattr(libc(), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
