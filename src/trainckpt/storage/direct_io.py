"""O_DIRECT: past the page cache, twice as fast for large files, without evicting other files.

The kernel wants whole pages: memory address, file position and length. A block can go directly if
its memory address and its file position agree modulo the page size. Its first and last partial
pages go through the cache. A file system may refuse O_DIRECT at open or only at the first write.
Then everything goes through the cache, and one log line says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_BYTES = 4096
FROM_BYTES = 1 << 20  # smaller blocks go through the page cache
PIECE_BYTES = 8 << 20  # per system call
# Refused by this file system, or for memory at this address.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)

logger = logging.getLogger("trainckpt")

_ANY_LENGTH = ctypes.c_ubyte * (sys.maxsize >> 1)  # one type per length takes 50 times as long
HUGE_BYTES = 2 << 20  # larger pages: fewer page faults and fewer requests to the disk
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class Direct:
    """Usability of O_DIRECT in one location.

    Attributes:
        works: Not refused so far.
    """

    def __init__(self, place: str) -> None:
        self.works = True
        self._place = place
        self._saying = threading.Lock()

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Wrap a direct call: on a refusal log it once, clear `works`, and suppress the error."""
        try:
            yield
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            with self._saying:
                if self.works:
                    self.works = False
                    logger.info(
                        "%s refuses O_DIRECT (%s): files there go through the page cache, slower",
                        self._place,
                        error.strerror,
                    )


class Body(NamedTuple):
    """Whole pages inside a block, fit for O_DIRECT: bytes `begin` to `end` of it."""

    begin: int
    end: int


def body(first_byte: int, block: memoryview) -> Body | None:
    """Return the whole pages of a large block; None if it is small, read-only or misaligned."""
    where = None if len(block) < FROM_BYTES else address(block)
    if where is None or (where - first_byte) % PAGE_BYTES:
        return None
    begin = -first_byte % PAGE_BYTES
    return Body(begin, len(block) - (first_byte + len(block)) % PAGE_BYTES)


def may_be_huge(block: memoryview) -> bool:
    """Return True if a block may lie in huge pages; into other memory a disk reads page by page."""
    return (address(block) or 1) % HUGE_BYTES == 0


def address(block: memoryview) -> int | None:
    """Return a block's memory address; None if it cannot be known (the block is read-only)."""
    if block.readonly or not block.contiguous or not len(block):
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def at_address(where: int, num_bytes: int, owner: object = None) -> memoryview:
    """Return a view of `num_bytes` at an address.

    The view keeps `owner` alive, if any; without it the caller keeps the memory.
    """
    block: Any = _ANY_LENGTH.from_address(where)
    block.owner = owner
    return memoryview(block).cast("B")[:num_bytes]


def populate(block: memoryview) -> bool:
    """Make the whole pages inside this memory now, without the GIL, so later writes need not wait.

    Returns:
        False if the system cannot (before Linux 5.14): the writes wait.
    """
    where = address(block) or 0
    begin, end = (
        -(-where // PAGE_BYTES) * PAGE_BYTES,
        (where + len(block)) // PAGE_BYTES * PAGE_BYTES,
    )
    if begin >= end:
        return True
    with contextlib.suppress(AttributeError, OSError):
        return bool(libc().madvise(begin, end - begin, _POPULATE_WRITE) == 0)
    return False


def copy(into: memoryview, data: memoryview) -> None:
    """Run `into[:] = data` without the GIL."""
    if not len(into) and not len(data):
        return
    target, source = address(into), address(data)
    if target is None or source is None or len(into) != len(data):
        into[:] = data
    else:
        ctypes.memmove(target, source, len(data))


def memory(num_bytes: int, first_byte: int = 0) -> memoryview:
    """Return fresh memory, aligned like `num_bytes` from `first_byte` of a file."""
    before = first_byte % PAGE_BYTES
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(num_bytes))
    fresh = mmap.mmap(-1, before + num_bytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(fresh)[before : before + num_bytes]


def buffers(num: int, num_bytes: int) -> list[memoryview]:
    """Return `num` fresh blocks of `num_bytes`, in huge pages if the system has them."""
    if num_bytes < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [memory(num_bytes) for _ in range(num)]
    fresh = mmap.mmap(-1, num * num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        fresh.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(fresh)
    first = -(address(whole) or 0) % HUGE_BYTES
    places = range(first, first + num * num_bytes, num_bytes)
    return [whole[at : at + num_bytes] for at in places]
