"""A new file on its way to stable storage, written by several threads.

    reserve     the space, where the length is known: a full disk refuses before anything is written
    put         each block to its place; of a large one the whole pages past the page cache, in
                pieces, by a few writers, while whoever writes already prepares the next block
    at the end  all writers are done; fsync

Nothing refers to the file before that. If anything fails, no file is left; what somebody else has
put in its place is his, and stays.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.tiers.direct import FROM_BYTES, body
from trainckpt.tiers.disk_reads import DiskReads
from trainckpt.tiers.queue_depth import QueueDepth
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainckpt.tiers.direct import Direct
    from trainckpt.tiers.disk import Disk

MOST_WRITERS = 16
PIECE_BYTES = 2 << 20  # of one system call
QUIET_PIECE_BYTES = 8 << 20  # where nobody reads from that disk
TELLS_FROM_BYTES = 32 << 20  # what is smaller says little of a disk


class Pace:
    """How many writes past the page cache are on their way at once in one place, and of how many
    bytes. Any thread.

    Few and small, so that others who read from the same disk need not wait; more where that pays,
    larger where nobody reads. One file tells for the next.
    """

    def __init__(self) -> None:
        self._depth = QueueDepth(MOST_WRITERS, enough=math.inf)
        self._reads = DiskReads()
        self._lock = threading.Lock()

    def piece_bytes(self, device: int) -> int:
        """Of one write that is begun now, to a file on this device."""
        with self._lock:
            return QUIET_PIECE_BYTES if self._reads.are_few(device) else PIECE_BYTES

    @property
    def num_writers(self) -> int:
        """Of a file that is begun now."""
        return self._depth.now

    def wrote(self, num_bytes: int, num_writers: int, busy_s: float) -> None:
        """So much of a file was written by so many, who had something to write for so long."""
        with self._lock:
            if num_bytes >= TELLS_FROM_BYTES and num_writers == self._depth.now:
                self._depth.measured(num_bytes / max(busy_s, 1e-9))


class _Busy:
    """For how long anybody was at it, and how much was done. A context of whoever is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = self.num_bytes = 0
        self._since_s = self.seconds = 0.0

    @contextlib.contextmanager
    def at(self, num_bytes: int) -> Iterator[None]:
        """Around so much."""
        with self._lock:
            if self._num == 0:
                self._since_s = time.perf_counter()
            self._num += 1
        try:
            yield
        finally:
            with self._lock:
                self._num -= 1
                self.num_bytes += num_bytes
                if self._num == 0:
                    self.seconds += time.perf_counter() - self._since_s


class NewFile:
    """One file that is being written; used by one thread. Made by `new_file`.

    Attributes:
        busy: With writing past the page cache.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        descriptor: int,
        direct: Direct,
        pace: Pace,
        workers: Workers,
    ) -> None:
        self._disk, self._path, self._descriptor = disk, path, descriptor
        self._pace = pace
        self._direct, self._workers, self.busy = direct, workers, _Busy()
        self._bypass: int | None = None  # the same file, past the page cache
        self._opening = threading.Lock()
        self._places: list[tuple[int, int]] = []

    def reserve(self, num_bytes: int) -> None:
        """Have the space for so many bytes; refused (ENOSPC) where there is not as much."""
        self._disk.cut(self._path, self._descriptor, num_bytes)
        self._disk.reserve(self._path, self._descriptor, num_bytes)

    def put(self, first_byte: int, block: memoryview) -> None:
        """Write a block to its place. A large one is on its way when this returns: see `settle`."""
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
        """Return when all that was put is written, and its memory may change."""
        self._workers.settle()

    def mark(self) -> int:
        """What was put so far, for `settle_to`."""
        return self._workers.num_asked

    def settle_to(self, mark: int) -> None:
        """Return when all that was put before this mark is written."""
        self._workers.settle_first(mark)

    def must_hold(self, num_bytes: int) -> None:
        """Refuse what was put if it is not so many bytes, each once.

        Raises:
            ValueError: it leaves a gap, or overlaps, or ends elsewhere.
        """
        at = 0
        for first_byte, length in [*sorted(self._places), (num_bytes, 0)]:
            if first_byte != at:
                raise ValueError(f"byte {min(at, first_byte)} of {self._path} was not put once")
            at += length

    def finish(self) -> None:
        """All was put: return when it is on stable storage."""
        self.settle()
        self._disk.sync(self._path, self._descriptor)

    def close(self) -> None:
        """Let go of the file; nobody writes to it any more."""
        for descriptor in (self._descriptor, self._bypass):
            if descriptor is not None:
                os.close(descriptor)

    def _in_pieces(
        self, first_byte: int, block: memoryview, write: Callable[[int, memoryview], None]
    ) -> None:
        if len(block) < FROM_BYTES:
            write(first_byte, block)
            return
        for at in range(0, len(block), QUIET_PIECE_BYTES):
            part = block[at : at + QUIET_PIECE_BYTES]
            self._workers.submit(partial(self._in_turn, first_byte + at, part, write))

    def _in_turn(
        self, first_byte: int, part: memoryview, write: Callable[[int, memoryview], None]
    ) -> None:
        """By as many calls as others who use the disk ask for now."""
        step = self._pace.piece_bytes(os.fstat(self._descriptor).st_dev)
        for at in range(0, len(part), step):
            write(first_byte + at, part[at : at + step])

    def _past_cache(self, first_byte: int, piece: memoryview) -> None:
        with self._direct.tried():
            if self._direct.works:
                with self._opening:
                    if self._bypass is None:
                        self._bypass = self._disk.open_direct(self._path)
                with self.busy.at(len(piece)):
                    self._disk.write(self._path, self._bypass, piece, first_byte)
                return
        self._through_cache(first_byte, piece)

    def _through_cache(self, first_byte: int, piece: memoryview) -> None:
        if len(piece):
            self._disk.write(self._path, self._descriptor, piece, first_byte)


@contextlib.contextmanager
def new_file(
    disk: Disk, path: Path, direct: Direct, pace: Pace, *, is_spare: bool = False
) -> Iterator[NewFile]:
    """A file to put blocks into, on stable storage when the context ends; removed if that fails.

    Args:
        disk, path, direct, pace: Where, and how.
        is_spare: It is there, with bytes of no worth.
    """
    num_writers = pace.num_writers
    descriptor = disk.open_again(path) if is_spare else disk.create(path)
    workers = Workers(num_writers, "trainckpt-write")
    file = NewFile(disk, path, descriptor, direct, pace, workers)
    try:
        with workers:  # when it is left no writer is at the file
            yield file
            file.finish()
            pace.wrote(file.busy.num_bytes, num_writers, file.busy.seconds)
    except BaseException:
        with contextlib.suppress(OSError):  # on a full disk, the space it took
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                disk.remove(path)
        raise
    finally:
        file.close()
