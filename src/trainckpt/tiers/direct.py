"""O_DIRECT: past the page cache, twice as fast for large files, and nothing else is evicted.

The kernel wants whole pages: memory, place in the file and length. So a block can go directly if
its memory lies as its bytes lie in the file, to the byte inside a page; only its first and last
bytes, no full page, go through the cache. A file system may refuse O_DIRECT when a file is opened,
or only when it is written. Then everything goes through the cache, and one line says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_BYTES = 4096
FROM_BYTES = 1 << 20  # what is smaller goes through the page cache
PIECE_BYTES = 8 << 20  # of one system call
# Not on this file system, or not with memory that lies so.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)

logger = logging.getLogger("trainckpt")

_ANY_LENGTH = ctypes.c_ubyte * (sys.maxsize >> 1)  # to make a type for each takes 50 times as long
HUGE_BYTES = 2 << 20  # pages that fewer requests to a disk, and fewer faults, are made of
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class Direct:
    """Whether O_DIRECT is still tried in one place.

    Attributes:
        works: Not refused so far.
    """

    def __init__(self, place: str) -> None:
        self.works = True
        self._place = place
        self._saying = threading.Lock()

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Around a direct call: if it is refused, say so once, and go on behind the block."""
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
                        self._place, error.strerror,
                    )  # fmt: skip


class Body(NamedTuple):
    """The whole pages inside a block, which can go directly: bytes `begin` to `end` of it."""

    begin: int
    end: int


def body(first_byte: int, block: memoryview) -> Body | None:
    """The pages of a large block that lies in memory as it does in the file; None: it does not."""
    where = None if len(block) < FROM_BYTES else address(block)
    if where is None or (where - first_byte) % PAGE_BYTES:
        return None
    begin = -first_byte % PAGE_BYTES
    return Body(begin, len(block) - (first_byte + len(block)) % PAGE_BYTES)


def may_be_huge(block: memoryview) -> bool:
    """Whether a block may lie in huge pages: to others a disk brings a page at a time."""
    return (address(block) or 1) % HUGE_BYTES == 0


def address(block: memoryview) -> int | None:
    """Where a block lies in memory; None where that cannot be known (it cannot be written to)."""
    if block.readonly or not block.contiguous or not len(block):
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def at_address(where: int, num_bytes: int, owner: object = None) -> memoryview:
    """The memory that lies there. The view keeps `owner`; without one whoever asks keeps it."""
    block: Any = _ANY_LENGTH.from_address(where)
    block.owner = owner
    return memoryview(block).cast("B")[:num_bytes]


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, looked up once: a resume asks it a thousand times."""
    return ctypes.CDLL(None, use_errno=True)


def populate(block: memoryview) -> bool:
    """Have the system make the pages inside this memory now, without the interpreter's lock, so
    that whoever writes to it need not wait. Where that cannot be asked for (False), the writer
    waits.
    """
    where = address(block) or 0
    begin, end = (
        -(-where // PAGE_BYTES) * PAGE_BYTES,
        (where + len(block)) // PAGE_BYTES * PAGE_BYTES,
    )
    if begin >= end:
        return True
    with contextlib.suppress(AttributeError, OSError):
        size = ctypes.c_size_t(end - begin)
        made = libc().madvise(ctypes.c_void_p(begin), size, ctypes.c_int(_POPULATE_WRITE))
        return bool(made == 0)
    return False


def copy(into: memoryview, data: memoryview) -> None:
    """`into[:] = data`, while other threads run."""
    if not len(into) and not len(data):
        return
    target, source = address(into), address(data)
    if target is None or source is None or len(into) != len(data):
        into[:] = data
    else:
        ctypes.memmove(target, source, len(data))


def memory(num_bytes: int, first_byte: int = 0) -> memoryview:
    """Fresh memory that lies as `num_bytes` from `first_byte` of a file do."""
    before = first_byte % PAGE_BYTES
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(num_bytes))
    fresh = mmap.mmap(-1, before + num_bytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(fresh)[before : before + num_bytes]


def buffers(num: int, num_bytes: int) -> list[memoryview]:
    """Fresh memory, several times as much: of huge pages, where the system has them."""
    if num_bytes < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [memory(num_bytes) for _ in range(num)]
    fresh = mmap.mmap(-1, num * num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        fresh.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(fresh)
    first = -(address(whole) or 0) % HUGE_BYTES
    places = range(first, first + num * num_bytes, num_bytes)
    return [whole[at : at + num_bytes] for at in places]
