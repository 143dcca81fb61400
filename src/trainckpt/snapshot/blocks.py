"""Read runs of blocks from a file and verify each block as soon as it arrives.

    loads       yields runs of whole blocks, at most a few MiB each: read to their final memory,
                or through scratch where only a part of a block is wanted
    Batch       reads the runs of one file with several threads and joins small neighbours;
                the thread that reads a run verifies it while others read the next

Every wanted byte is read once. Used by `Reader` and the fetch into this host's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.digest import Verified
from trainckpt.storage.direct_io import FROM_BYTES, PAGE_BYTES, address, copy, memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.shard_file import Region
    from trainckpt.storage.base import Readable

READ_BYTES = 8 << 20  # of one read, more only where a single block is longer
NEAR_BYTES = 1 << 20  # the same in memory: small enough to be verified in a core's cache
SCRATCH_BYTES = 32 << 20
PROVED_FROM_BYTES = 64 << 10
CLOSE_BYTES = PAGE_BYTES  # small reads no further apart are joined


class RegionLocation(NamedTuple):
    """A region and the offset of its first byte in the file that stores it.

    The file belongs to this snapshot, or to an older one it refers to.
    """

    key: str
    first_byte: int
    region: Region


class BlockRead(NamedTuple):
    """A run of blocks of one region.

    Attributes:
        place: The region.
        first, last: Offsets in the region of the run's first byte, and one past its last.
        into: Memory for the whole run; None: only a part is wanted.
        wanted: The region offset of the wanted part, and memory for it.
    """

    place: RegionLocation
    first: int
    last: int
    into: memoryview | None
    wanted: tuple[int, memoryview] | None = None

    @property
    def first_byte(self) -> int:
        """Return the offset of the run in the file."""
        return self.place.first_byte + self.first

    @property
    def digests(self) -> str:
        """Return the digests of the run's blocks, concatenated."""
        block = self.place.region.bytes_per_digest or 1
        at = self.first // block * digest.NUM_HEX
        end = at + max(1, -(-(self.last - self.first) // block)) * digest.NUM_HEX
        return self.place.region.digest[at:end]

    @property
    def verified(self) -> Verified | None:
        """Return the memory verified by `take` if it is the whole run and large; else None."""
        if self.into is None or len(self.into) < PROVED_FROM_BYTES:
            return None
        where, block = address(self.into), self.place.region.bytes_per_digest
        return Verified(where, len(self.into), block, self.digests) if where is not None else None

    def take(self, data: memoryview) -> None:
        """Verify the data read, and copy it to its memory unless it was read there.

        Raises:
            UnusableSnapshot: a block does not match its digest.
        """
        if not self.is_good(data):
            raise UnusableSnapshot(
                f"{self.place.key}: {self.place.region.key[:100]} does not match its digest"
            )
        if self.into is not None and data is not self.into:
            copy(self.into, data)
        elif self.wanted is not None:
            begin, into = self.wanted
            copy(into, data[begin - self.first : begin - self.first + len(into)])

    def is_good(self, data: memoryview) -> bool:
        """Return True if the data matches the digests of its blocks."""
        block = self.place.region.bytes_per_digest or 1
        return digest.digests_by_block(data, block) == self.digests


def hull(place: RegionLocation, begin: int, end: int) -> tuple[int, int]:
    """Return the span of the blocks that hold `begin` to `end`: first byte, one past the last."""
    block = place.region.bytes_per_digest
    if not block:
        return 0, 0
    return begin // block * block, min(-(-end // block) * block, place.region.num_bytes)


def loads(
    place: RegionLocation, begin: int, end: int, into: memoryview, most: int = READ_BYTES
) -> Iterator[BlockRead]:
    """Yield the reads that bring bytes `begin` to `end` of a region to `into`, verified.

    `most`: bytes of one read.
    """
    block = place.region.bytes_per_digest
    at, last = hull(place, begin, end)
    if not block:
        yield BlockRead(place, 0, 0, into)
    whole = end if end == last else end // block * block  # up to here every block is wanted whole
    while at < last:
        if at >= begin and at < whole:
            to = min(at + max(most // block, 1) * block, whole)
            yield BlockRead(place, at, to, into[at - begin : to - begin])
        else:
            to = min(at + block, last)
            low, high = max(at, begin), min(to, end)
            yield BlockRead(place, at, to, None, (low, into[low - begin : high - begin]))
        at = to


class Batch:
    """Reads performed together; used by one thread.

    Attributes:
        verified: Large runs read straight to their final memory.
    """

    def __init__(self, tier: Readable) -> None:
        self.verified: list[Verified] = []
        self._tier = tier
        self._key = ""
        self._parts: list[tuple[int, memoryview]] = []
        self._loads: list[list[tuple[BlockRead, int]]] = []  # of each part, with its offset there
        self._small: list[BlockRead] = []  # neighbours, not yet a part
        self._scratch: memoryview | None = None
        self._used = 0

    def add(self, load: BlockRead) -> None:
        """Queue a read, in file order. May first perform the reads queued before."""
        if load.place.key != self._key:
            self.read()
            self._key = load.place.key
        size = load.last - load.first
        if not size:
            load.take(memoryview(b""))
        elif size < FROM_BYTES or load.into is None:
            self._add_small(load)
        else:
            self._join()
            self._parts.append((load.first_byte, load.into))
            self._loads.append([(load, 0)])

    def read(self) -> None:
        """Read and verify everything queued.

        Raises:
            UnusableSnapshot: a file ends too early, or a block does not match its digest.
            TierUnavailable: the tier refused.
        """
        self._join()
        parts, self._parts, of_parts, self._loads = self._parts, [], self._loads, []
        self._used = 0

        def take(number: int) -> None:
            # on any thread
            data = parts[number][1]
            for load, at in of_parts[number]:
                size = load.last - load.first
                piece = data if size == len(data) else data[at : at + size]
                load.take(piece)
                if (verified := load.verified) is not None:
                    self.verified.append(verified)

        if parts:
            self._tier.read_parts(self._key, parts, take)

    def _add_small(self, load: BlockRead) -> None:
        if self._small:
            first, last = self._small[0].first_byte, self._small[-1]
            behind = last.first_byte + last.last - last.first
            end = load.first_byte + load.last - load.first
            if not 0 <= load.first_byte - behind <= CLOSE_BYTES or end - first > READ_BYTES:
                self._join()
        self._small.append(load)

    def _join(self) -> None:
        """Make one part of small neighbouring reads."""
        small, self._small = self._small, []
        if not small:
            return
        first = small[0].first_byte
        size = small[-1].first_byte + small[-1].last - small[-1].first - first
        into = small[0].into if len(small) == 1 else None
        if into is None:
            into = self._scratch_for(first, size)
        self._parts.append((first, into))
        self._loads.append([(load, load.first_byte - first) for load in small])

    def _scratch_for(self, first_byte: int, num_bytes: int) -> memoryview:
        """Return scratch memory, aligned as in the file, valid until the next `read`."""
        begin = self._used + (first_byte - self._used) % PAGE_BYTES
        if begin + num_bytes > SCRATCH_BYTES:
            self.read()
            begin = first_byte % PAGE_BYTES
        if begin + num_bytes > SCRATCH_BYTES:
            return memory(num_bytes, first_byte)
        if self._scratch is None:
            self._scratch = memory(SCRATCH_BYTES)
        self._used = begin + num_bytes
        return self._scratch[begin : begin + num_bytes]
