"""Memory that a dump need not hold, since a snapshot does: dropped in place, filled again later.

    drop     a digest of each tensor's bytes; then its pages are given back to the kernel
    filled   the digests are compared

The addresses stay, so views, optimizers and whatever else holds the tensors notice nothing, as long
as nobody looks between the two. Given back is only what comes back as it was: whole pages inside
tensors that lie row-major in private memory of no file. Their edges stay, and so does anything
shared, locked or not on the CPU.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.digest import digest
from trainckpt.state.destination import Destination
from trainckpt.state.stage import TYPES, bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from trainckpt.format.layout import Box
    from trainckpt.state.captured import Captured

LEAST_BYTES = 32 << 10  # what is smaller stays
MADV_DONTNEED = 4
MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Dropped:
    """What is to be filled again.

    Attributes:
        tensors: Name -> the live tensor.
        wanted: Name -> its box of the whole; None: it is the whole.
        digests: Name -> of its bytes, before they were dropped.
        num_bytes: That were given back.
    """

    tensors: dict[str, torch.Tensor]
    wanted: dict[str, Box | None]
    digests: dict[str, str]
    num_bytes: int

    def destination(self) -> Destination:
        """Where a restore fills the very tensors."""
        return Destination(self.wanted, into=self.tensors)

    def filled(self) -> None:
        """Raise `UnusableSnapshot` unless every byte is what it was."""
        other = [n for n, t in self.tensors.items() if digest(bytes_of(t)) != self.digests[n]]
        if other:
            raise UnusableSnapshot(f"not what it was before the dump: {', '.join(other[:5])[:300]}")


def drop(captured: Captured, stored: Collection[str]) -> Dropped:
    """Give back the memory of what is stored. Only where nothing reads it meanwhile.

    Args:
        captured: The state as it is now, which is what was stored.
        stored: Names of the tensors that can be read back.
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
    boxes = {name: captured.placed[name].box if name in captured.placed else None
             for name in tensors}  # fmt: skip
    return Dropped(tensors, boxes, digests, dropped)


def discard(memory: memoryview) -> None:
    """Give back memory in which nothing is kept."""
    if len(memory):
        first = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        begin, end = _pages(first, len(memory))
        if begin < end and _Private().holds(begin, end):
            _give_back(begin, end)


class _Private:
    """Where this process has private memory of no file."""

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
    """The whole pages among so many bytes from an address on."""
    page = mmap.PAGESIZE
    return -(-first // page) * page, (first + num_bytes) // page * page


def _give_back(begin: int, end: int) -> bool:
    """False where the kernel keeps it, as it keeps what is locked."""
    return bool(_libc().madvise(begin, end - begin, MADV_DONTNEED) == 0)


def _trim() -> None:
    """What was freed, and malloc holds back."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
