"""Read parts of a file with several threads, and report each as soon as it is full.

Whole pages of a large part bypass the page cache. They go through a buffer of huge pages, or
directly to a target possibly in huge pages itself. Into ordinary, scattered pages a disk was seen
to deliver a third as much. Partial pages and small parts come through the cache, without
read-ahead: no byte is fetched twice.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.storage.direct_io import (
    FROM_BYTES,
    HUGE_BYTES,
    PAGE_BYTES,
    PIECE_BYTES,
    body,
    buffers,
    copy,
    may_be_huge,
)
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainckpt.storage.direct_io import Direct
    from trainckpt.storage.disk import Disk

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
        with ExitStack() as stack:
            for descriptor in (self._descriptor, self._bypass):
                if descriptor is not None:
                    stack.callback(os.close, descriptor)

    @property
    def num_bytes(self) -> int:
        """Return its length now."""
        return os.fstat(self._descriptor).st_size

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Read until `into` is full; a file too short is an error."""
        done = 0
        if len(into) >= FROM_BYTES and self._direct.works:
            pages = body(first_byte, into)
            if pages is None:
                done = self._by_way_of_a_buffer(first_byte, into)
            else:
                self._through_cache(first_byte, into[: pages.begin])
                inside = into[pages.begin : pages.end]
                straight = may_be_huge(inside)
                way = self._past_cache if straight else self._by_way_of_a_buffer
                done = pages.begin + way(first_byte + pages.begin, inside)
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
            copy(into[done : done + there], self._own.buffer[before : before + there])
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
