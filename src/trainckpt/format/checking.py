"""Whether bytes are the file that a manifest names: as they pass by, or where they lie.

What a manifest tells of a whole file is compared with it. Where it tells of the head alone, that
is the root of a tree of digests: in the head stand those of every block behind it, and between the
regions is no gap, behind them nothing. So every byte of the file is covered, and whoever writes
one has digested none twice.

Opens nothing. Used by: whoever copies, keeps or verifies whole files.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, shard_file
from trainckpt.format.files import FileEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PREFIX_BYTES = 8
STEP_BYTES = 1 << 20  # a tenth of a millisecond


class Stored(Protocol):
    """What has to be known of a file: a `FileEntry`, or the like of what is no shard file."""

    @property
    def num_bytes(self) -> int:
        """Its length."""

    @property
    def digest(self) -> str:
        """Of all of it; "" only in a `FileEntry`."""


class Check(Protocol):
    """Of one file whose bytes pass by, in order, in pieces of any length."""

    def update(self, piece: memoryview) -> None:
        """The next bytes."""

    @property
    def is_right(self) -> bool:
        """Whether what has passed is the file, whole."""


class WholeCheck:
    """A `Check` by the digest of all bytes."""

    def __init__(self, wanted: str) -> None:
        self._wanted, self._passed = wanted, digest.Running()

    def update(self, piece: memoryview) -> None:
        """As `Check`."""
        self._passed.update(piece)

    @property
    def is_right(self) -> bool:
        """As `Check`."""
        return self._passed.hexdigest() == self._wanted


class TreeCheck:
    """A `Check` of a shard file by its head's digest, and by the digests that the head holds."""

    def __init__(self, num_bytes: int, header_digest: str) -> None:
        self._num_bytes, self._wanted = num_bytes, header_digest
        self._head, self._head_bytes = bytearray(), PREFIX_BYTES
        self._regions: Iterator[shard_file.Region] = iter(())
        self._region: shard_file.Region | None = None
        self._passed, self._left = digest.RunningByBlock(1), 0
        self._is_read = self._is_bad = False  # the head; what has passed so far

    def update(self, piece: memoryview) -> None:
        """As `Check`."""
        while not (self._is_read or self._is_bad) and len(piece):
            step = piece[: self._head_bytes - len(self._head)]
            self._head += step
            piece = piece[len(step) :]
            if len(self._head) == self._head_bytes:
                self._take_head()
        while len(piece) and not self._is_bad:
            self._is_bad = self._region is None  # behind the last
            step = piece[: min(self._left, STEP_BYTES)]
            self._passed.update(step)
            self._left -= len(step)
            piece = piece[len(step) :]
            self._go_on()
            time.sleep(0)  # small blocks are digested without letting go of the interpreter

    @property
    def is_right(self) -> bool:
        """As `Check`."""
        return self._is_read and not self._is_bad and self._region is None

    def _take_head(self) -> None:
        """Its prefix, and in the end all of it."""
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
        """To the next region, past those that are complete."""
        while not self._left and not self._is_bad:
            if self._region is not None:
                self._is_bad = self._passed.hexdigest() != self._region.digest
            self._region = next(self._regions, None)
            if self._region is None:
                return
            self._left = self._region.num_bytes
            self._passed = digest.RunningByBlock(self._region.bytes_per_digest)


def check_of(file: Stored) -> Check:
    """The check of one file."""
    if file.digest:
        return WholeCheck(file.digest)
    assert isinstance(file, FileEntry)
    return TreeCheck(file.num_bytes, file.header_digest)


def is_file(data: memoryview, file: Stored) -> bool:
    """Whether these bytes are the file."""
    check = check_of(file)
    check.update(data)
    return check.is_right


def over(blocks: Iterable[memoryview], check: Check) -> Iterator[memoryview]:
    """The same blocks, each checked as it passes."""
    for block in blocks:
        check.update(block)
        yield block
