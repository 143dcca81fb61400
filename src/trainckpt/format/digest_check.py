"""Check that bytes are the file named by a manifest, in a stream or in memory.

A manifest's digest of the whole file is compared. Without one, the head's digest is the root of a
tree: the head has the digests of all blocks behind it. Regions leave no gap and end with the file,
so every byte is covered, and a writer digests none twice.

Opens nothing. Used by code that copies, stores or verifies whole files.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, shard_file
from trainckpt.format.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX_BYTES = 8
STEP_BYTES = 1 << 20  # takes a tenth of a millisecond


class StoredBytes(Protocol):
    """The facts to check: a `FileEntry`, or the like for another kind of file."""

    @property
    def num_bytes(self) -> int:
        """Return its length."""

    @property
    def digest(self) -> str:
        """Return the digest of the whole file; "" only in a `FileEntry`."""


class WholeCheck(digest.Running):
    """Check a file's bytes, fed in order in pieces of any length, by the digest of all."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = wanted

    @property
    def is_right(self) -> bool:
        """Return True if the bytes so far are the complete, correct file."""
        return self.hexdigest() == self._wanted


class TreeCheck:
    """As `WholeCheck`, but by the digest of a shard file's head, and by the digests in it."""

    def __init__(self, num_bytes: int, header_digest: str) -> None:
        self._num_bytes, self._wanted = num_bytes, header_digest
        self._head, self._head_bytes = bytearray(), PREFIX_BYTES
        self._regions: Iterator[shard_file.Region] = iter(())
        self._region: shard_file.Region | None = None
        self._passed, self._left = digest.RunningByBlock(1), 0
        self._is_read = self._is_bad = False  # head parsed; some byte is wrong

    def update(self, piece: memoryview) -> None:
        """Add the next bytes."""
        while not (self._is_read or self._is_bad) and len(piece):
            step = piece[: self._head_bytes - len(self._head)]
            self._head += step
            piece = piece[len(step) :]
            if len(self._head) == self._head_bytes:
                self._take_head()
        while len(piece) and not self._is_bad:
            self._is_bad = self._region is None  # bytes after the last region
            step = piece[: min(self._left, STEP_BYTES)]
            self._passed.update(step)
            self._left -= len(step)
            piece = piece[len(step) :]
            self._go_on()
            time.sleep(0)  # let other threads run: digesting small blocks keeps the interpreter

    @property
    def is_right(self) -> bool:
        """Return the result; as `WholeCheck`."""
        return self._is_read and not self._is_bad and self._region is None

    def _take_head(self) -> None:
        """Parse the prefix, and finally the whole head."""
        head = bytes(self._head)
        try:
            self._head_bytes = shard_file.header_length(head, "a file")
            if len(head) < self._head_bytes:
                self._is_bad = self._head_bytes > self._num_bytes
                return
            if digest.digest(head) != self._wanted:
                self._is_bad = True
                return
            header = shard_file.parse(head, "a file", file_bytes=self._num_bytes)
        except UnusableSnapshot:
            self._is_bad = True
            return
        self._is_read, self._regions = True, iter(header.regions)
        self._go_on()

    def _go_on(self) -> None:
        """Advance to the next incomplete region, checking the complete ones."""
        while not self._left and not self._is_bad:
            if self._region is not None:
                self._is_bad = self._passed.hexdigest() != self._region.digest
            self._region = next(self._regions, None)
            if self._region is None:
                return
            self._left = self._region.num_bytes
            self._passed = digest.RunningByBlock(self._region.bytes_per_digest)


def check_of(file: StoredBytes) -> WholeCheck | TreeCheck:
    """Return a check for one file."""
    if file.digest:
        return WholeCheck(file.digest)
    assert isinstance(file, FileEntry)
    return TreeCheck(file.num_bytes, file.header_digest)


def is_file(data: memoryview, file: StoredBytes) -> bool:
    """Return True if these bytes are the file."""
    check = check_of(file)
    check.update(data)
    return check.is_right
