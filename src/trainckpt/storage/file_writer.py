"""Write a new file to stable storage with several threads.

    reserve     the space, if the length is known: a full disk refuses before the first write
    put         each block at its position; writer threads send large blocks past the page cache,
                in pieces, while the caller prepares the next block
    at the end  wait for the writer threads; fsync

Nothing refers to the file before the end. On failure the file is removed, unless another process
has replaced it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.storage.direct_io import FROM_BYTES, body
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainckpt.storage.direct_io import Direct
    from trainckpt.storage.disk import Disk

# Writes on their way at once. What lies in a disk's queue is served before the next read of a data
# loader: with 4 writes of 8 MiB it waited 12.6 ms, with these 1.3 ms (docs/performance.md).
NUM_WRITERS = 2
PIECE_BYTES = 2 << 20


class FileWriter:
    """One file being written, from one thread. Made by `new_file`."""

    def __init__(
        self, disk: Disk, path: Path, descriptor: int, direct: Direct, workers: Workers
    ) -> None:
        self._disk, self._path, self._descriptor = disk, path, descriptor
        self._direct, self._workers = direct, workers
        self._bypass: int | None = None  # the same file, past the page cache
        self._opening = threading.Lock()
        self._places: list[tuple[int, int]] = []

    def reserve(self, num_bytes: int) -> None:
        """Reserve `num_bytes` of disk space; a full disk refuses (ENOSPC)."""
        self._disk.reserve(self._path, self._descriptor, num_bytes)

    def put(self, first_byte: int, block: memoryview) -> None:
        """Write a block at its position. A large one may be in flight on return: see `settle`."""
        self._places.append((first_byte, len(block)))
        pages = body(first_byte, block) if self._direct.works else None
        if pages is None:
            self._in_pieces(first_byte, block, self._through_cache)
            return
        self._through_cache(first_byte, block[: pages.begin])
        inside = block[pages.begin : pages.end]
        self._in_pieces(first_byte + pages.begin, inside, self._past_cache)
        self._through_cache(first_byte + pages.end, block[pages.end :])

    def settle(self) -> None:
        """Wait for all blocks put so far; their memory may change afterwards."""
        self._workers.settle()

    def mark(self) -> int:
        """Return a mark of the blocks put so far, for `settle_to`."""
        return self._workers.num_asked

    def settle_to(self, mark: int) -> None:
        """Wait for all blocks put before this mark."""
        self._workers.settle_first(mark)

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
        self.settle()
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
        for at in range(0, len(block), PIECE_BYTES):
            self._workers.submit(partial(write, first_byte + at, block[at : at + PIECE_BYTES]))

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
    """Open a file for `put`; leaving the context syncs it to disk, a failure removes it.

    Args:
        disk, path, direct: Disk, location, and O_DIRECT state.
    """
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
