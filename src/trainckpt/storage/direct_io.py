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
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.storage.libc import libc
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainckpt.storage.local import Disk


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
    """Usability of O_DIRECT in one location; `works`: not refused so far."""

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
                    logger.debug(
                        "%s refuses O_DIRECT (%s): files there go through the page cache, slower",
                        self._place,
                        error.strerror,
                    )


def _whole_pages(first_byte: int, block: memoryview) -> slice | None:
    """Return the part of a large block fit for O_DIRECT; None if small, read-only or misaligned."""
    where = None if len(block) < FROM_BYTES else address(block)
    if where is None or (where - first_byte) % PAGE_BYTES:
        return None
    return slice(-first_byte % PAGE_BYTES, len(block) - (first_byte + len(block)) % PAGE_BYTES)


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
    begin = -(-where // PAGE_BYTES) * PAGE_BYTES
    end = (where + len(block)) // PAGE_BYTES * PAGE_BYTES
    if begin >= end:
        return True
    with contextlib.suppress(AttributeError, OSError):
        return bool(libc().madvise(begin, end - begin, _POPULATE_WRITE) == 0)
    return False


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """Run `into[:] = data` without the GIL."""
    if not len(into) and not len(data):
        return
    target, source = address(into), address(data)
    if target is None or source is None or len(into) != len(data):
        into[:] = data
    else:
        ctypes.memmove(target, source, len(data))


def private_memory(num_bytes: int, first_byte: int = 0) -> memoryview:
    """Return fresh memory of this process, aligned like `num_bytes` from `first_byte` of a file.

    It does not come from malloc, whose arenas would keep some for each calling thread.
    """
    before = first_byte % PAGE_BYTES
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return memoryview(bytearray(num_bytes))
    fresh = mmap.mmap(-1, before + num_bytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(fresh)[before : before + num_bytes]


def buffers(num: int, num_bytes: int) -> list[memoryview]:
    """Return `num` fresh blocks of `num_bytes`, in huge pages if the system has them."""
    if num_bytes < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [private_memory(num_bytes) for _ in range(num)]
    fresh = mmap.mmap(-1, num * num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        fresh.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(fresh)
    first = -(address(whole) or 0) % HUGE_BYTES
    places = range(first, first + num * num_bytes, num_bytes)
    return [whole[at : at + num_bytes] for at in places]


# ---- write a new file with several threads
#
#     reserve     the space, if the length is known: a full disk refuses before the first write
#     put         each block at its position; writer threads send large blocks past the page cache,
#                 in pieces, while the caller prepares the next block
#     at the end  wait for the writer threads; fsync
#
# Nothing refers to the file before the end. On failure the file is removed, unless another process
# has replaced it.


# Writes on their way at once. What lies in a disk's queue is served before the next read of a data
# loader: with 4 writes of 8 MiB it waited 12.6 ms, with these 1.3 ms (docs/performance.md).
NUM_WRITERS = 2
WRITE_PIECE_BYTES = 2 << 20


class FileWriter:
    """One file being written, from one thread. Made by `new_file`.

    Attributes:
        workers: Writes in flight: until one has ended, its memory must not change.
    """

    def __init__(
        self, disk: Disk, path: Path, descriptor: int, direct: Direct, workers: Workers
    ) -> None:
        self._disk, self._path, self._descriptor = disk, path, descriptor
        self._direct, self.workers = direct, workers
        self._bypass: int | None = None  # the same file, past the page cache
        self._opening = threading.Lock()
        self._places: list[tuple[int, int]] = []

    def reserve(self, num_bytes: int) -> None:
        """Reserve `num_bytes` of disk space; a full disk refuses (ENOSPC)."""
        self._disk.reserve(self._path, self._descriptor, num_bytes)

    def put(self, first_byte: int, block: memoryview) -> None:
        """Write a block at its position. A large one may be in flight on return."""
        self._places.append((first_byte, len(block)))
        pages = _whole_pages(first_byte, block) if self._direct.works else None
        if pages is None:
            self._in_pieces(first_byte, block, self._through_cache)
            return
        self._through_cache(first_byte, block[: pages.start])
        self._in_pieces(first_byte + pages.start, block[pages], self._past_cache)
        self._through_cache(first_byte + pages.stop, block[pages.stop :])

    def must_hold(self, num_bytes: int) -> None:
        """Check the blocks put so far against the file's length: every byte exactly once.

        Raises:
            ValueError: the blocks leave a gap, overlap, or end elsewhere.
        """
        at = 0
        for first_byte, length in [*sorted(self._places), (num_bytes, 0)]:
            if first_byte != at:
                raise ValueError(f"byte {min(at, first_byte)} of {self._path} was not put once")
            at += length

    def finish(self) -> None:
        """Wait for all blocks, then fsync the file."""
        self.workers.settle()
        self._disk.sync(self._path, self._descriptor)

    def close(self) -> None:
        """Close the file's descriptors, after the last write."""
        for descriptor in (self._descriptor, self._bypass):
            if descriptor is not None:
                os.close(descriptor)

    def _in_pieces(
        self, first_byte: int, block: memoryview, write: Callable[[int, memoryview], None]
    ) -> None:
        if len(block) < FROM_BYTES:
            write(first_byte, block)
            return
        for at in range(0, len(block), WRITE_PIECE_BYTES):
            piece = block[at : at + WRITE_PIECE_BYTES]
            self.workers.submit(partial(write, first_byte + at, piece))

    def _past_cache(self, first_byte: int, piece: memoryview) -> None:
        with self._direct.tried():
            if self._direct.works:
                with self._opening:
                    if self._bypass is None:
                        self._bypass = self._disk.open_direct(self._path)
                self._disk.write(self._path, self._bypass, piece, first_byte)
                return
        self._through_cache(first_byte, piece)

    def _through_cache(self, first_byte: int, piece: memoryview) -> None:
        if len(piece):
            self._disk.write(self._path, self._descriptor, piece, first_byte)


@contextlib.contextmanager
def new_file(disk: Disk, path: Path, direct: Direct) -> Iterator[FileWriter]:
    """Open a file for `put`; leaving the context syncs it to disk, a failure removes it."""
    descriptor = disk.create(path)
    workers = Workers(NUM_WRITERS, "trainckpt-write")
    file = FileWriter(disk, path, descriptor, direct, workers)
    try:
        with workers:  # its exit waits for all writer threads
            yield file
            file.finish()
    except BaseException:
        with contextlib.suppress(OSError):  # frees the space on a full disk
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                disk.remove(path)
        raise
    finally:
        file.close()


# ---- read parts of a file with several threads
#
# Whole pages of a large part bypass the page cache. They go through a buffer of huge pages, or
# directly to a target possibly in huge pages itself. Into ordinary, scattered pages a disk was seen
# to deliver a third as much. Partial pages and small parts come through the cache, without
# read-ahead: no byte is fetched twice.


NUM_READERS = 8


def read_parts(
    file: FileReader,
    parts: Sequence[tuple[int, memoryview]],
    done: Callable[[int], None],
    num_readers: int = NUM_READERS,
) -> None:
    """Fill every part from its first byte on; `done` gets each part's number, on any thread."""

    def one(number: int) -> None:
        file.fill(*parts[number])
        done(number)

    with Workers(min(num_readers, len(parts)), "trainckpt-read") as workers:
        for number in range(len(parts)):
            if len(parts) == 1:
                one(number)
            else:
                workers.submit(partial(one, number))
        workers.settle()


class FileReader:
    """A file opened for reading, by any threads; close it after the last read."""

    def __init__(self, disk: Disk, path: Path, key: str, direct: Direct) -> None:
        self._disk, self._path, self._key, self._direct = disk, path, key, direct
        self._opening, self._own = threading.Lock(), threading.local()
        self._descriptor = disk.open_to_read(path)
        self._bypass: int | None = None  # the same file, past the page cache

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._descriptor, self._bypass):
            if descriptor is not None:
                os.close(descriptor)

    @property
    def num_bytes(self) -> int:
        """Return its length now."""
        return os.fstat(self._descriptor).st_size

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Read until `into` is full; a file too short is an error."""
        done = 0
        if len(into) >= FROM_BYTES and self._direct.works:
            pages, read = _whole_pages(first_byte, into), self._by_way_of_a_buffer
            if pages is None:
                done = read(first_byte, into)
            else:
                self._through_cache(first_byte, into[: pages.start])
                if (address(into[pages]) or 1) % HUGE_BYTES == 0:  # may lie in huge pages
                    read = self._past_cache
                done = pages.start + read(first_byte + pages.start, into[pages])
        self._through_cache(first_byte + done, into[done:])

    def _past_cache(self, first_byte: int, into: memoryview) -> int:
        """Read whole pages; return the bytes read: fewer only if refused, or at the file's end."""
        done = 0
        with self._direct.tried():
            with self._opening:
                if self._bypass is None:
                    self._bypass = self._disk.open_to_read(self._path, direct=True)
            while done < len(into):
                piece = into[done : done + PIECE_BYTES]
                got = self._disk.read(self._path, self._bypass, piece, first_byte + done)
                done += got
                if got == 0 or got % PAGE_BYTES:
                    break
        return done

    def _by_way_of_a_buffer(self, first_byte: int, into: memoryview) -> int:
        """Read as `_past_cache`, into memory of any alignment."""
        if not hasattr(self._own, "buffer"):
            (self._own.buffer,) = buffers(1, HUGE_BYTES)
        done, before = 0, first_byte % PAGE_BYTES
        while done < len(into):
            wanted = min(len(into) - done, HUGE_BYTES - before)
            pages = -(-(before + wanted) // PAGE_BYTES) * PAGE_BYTES
            got = self._past_cache(first_byte + done - before, self._own.buffer[:pages])
            there = max(min(got - before, wanted), 0)
            copy_bytes(into[done : done + there], self._own.buffer[before : before + there])
            done += there
            if there < wanted:
                break
            before = (before + wanted) % PAGE_BYTES
        return done

    def _through_cache(self, first_byte: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = self._disk.read(self._path, self._descriptor, into[done:], first_byte + done)
            if not got:
                raise UnusableSnapshot(f"{self._key} ends {len(into) - done} bytes too early")
            done += got
