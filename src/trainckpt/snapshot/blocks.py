"""Blocks: what is read of a file in one go, verified block by block as soon as it is there.

    loads       of each region: runs of whole blocks, at most a few MiB, which may be read to where
                they belong, or through scratch memory where only some of a block is wanted
    Batch       loads of one file, read by several threads; small ones that lie together in one
                read. Whichever thread has read one verifies it while others read the next

Every byte that is wanted is read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.digest import Verified
from trainckpt.tiers.common_memory import put
from trainckpt.tiers.direct import FROM_BYTES, PAGE_BYTES, address, copy, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.shard_file import Region
    from trainckpt.tiers.base import Readable

READ_BYTES = 8 << 20  # of one read, more only where a single block is longer
NEAR_BYTES = 1 << 20  # the same in memory: a core's cache has it still when it is verified
SCRATCH_BYTES = 32 << 20
PROVED_FROM_BYTES = 64 << 10
CLOSE_BYTES = PAGE_BYTES  # what lies no further apart is read together


class Found(NamedTuple):
    """A region found in the header of a file, and the first byte of it in that file.

    The file is the one that holds its bytes: of this snapshot, or of one that it refers to.
    """

    key: str
    first_byte: int
    region: Region


class Load(NamedTuple):
    """A run of blocks of one region.

    Attributes:
        place: The region.
        first, last: Their first byte in the region, and the one behind the last.
        into: Memory for all of it; None: only some of it is wanted.
        wanted: From which byte of the region on some is wanted, and memory for that.
    """

    place: Found
    first: int
    last: int
    into: memoryview | None
    wanted: tuple[int, memoryview] | None = None

    @property
    def first_byte(self) -> int:
        """In the file."""
        return self.place.first_byte + self.first

    @property
    def digests(self) -> str:
        """Of its blocks, one after the other."""
        block = self.place.region.bytes_per_digest or 1
        at = self.first // block * digest.NUM_HEX
        end = at + max(1, -(-(self.last - self.first) // block)) * digest.NUM_HEX
        return self.place.region.digest[at:end]

    @property
    def verified(self) -> Verified | None:
        """What `take` has verified, if it is all of it, and large."""
        if self.into is None or len(self.into) < PROVED_FROM_BYTES:
            return None
        where, block = address(self.into), self.place.region.bytes_per_digest
        return Verified(where, len(self.into), block, self.digests) if where is not None else None

    def take(self, data: memoryview, *, is_verified: bool = False) -> None:
        """Verify what was read, and put it where it belongs, if it is not there.

        `is_verified`: it was before, on its way to where it was read (`is_verified` below).

        Raises:
            UnusableSnapshot: a block does not match its digest.
        """
        if not is_verified and not self.is_good(data):
            raise UnusableSnapshot(
                f"{self.place.key}: {self.place.region.key[:100]} does not match its digest"
            )
        if self.into is not None and data is not self.into:
            put(self.into, data)
        elif self.wanted is not None:
            begin, into = self.wanted
            copy(into, data[begin - self.first : begin - self.first + len(into)])

    def is_good(self, data: memoryview) -> bool:
        """Whether what was read matches the digests of its blocks."""
        block = self.place.region.bytes_per_digest or 1
        return digest.digests_by_block(data, block) == self.digests


def is_verified(tier: Readable, key: str) -> bool:
    """Whether a file was verified on its way to where a tier reads it, as `NearTier` may say."""
    asked: Callable[[str], bool] | None = getattr(tier, "is_verified", None)
    return asked is not None and asked(key)


def hull(place: Found, begin: int, end: int) -> tuple[int, int]:
    """First byte of the blocks that hold bytes `begin` to `end`, and the one behind the last."""
    block = place.region.bytes_per_digest
    if not block:
        return 0, 0
    return begin // block * block, min(-(-end // block) * block, place.region.num_bytes)


def loads(
    place: Found, begin: int, end: int, into: memoryview, most: int = READ_BYTES
) -> Iterator[Load]:
    """What is to be read so that bytes `begin` to `end` of a region come to `into`, verified.

    `most`: bytes of one load.
    """
    block = place.region.bytes_per_digest
    at, last = hull(place, begin, end)
    if not block:
        yield Load(place, 0, 0, into)
    whole = end if end == last else end // block * block  # up to here every block is wanted whole
    while at < last:
        if at >= begin and at < whole:
            to = min(at + max(most // block, 1) * block, whole)
            yield Load(place, at, to, into[at - begin : to - begin])
        else:
            to = min(at + block, last)
            low, high = max(at, begin), min(to, end)
            yield Load(place, at, to, None, (low, into[low - begin : high - begin]))
        at = to


class Batch:
    """Loads that are read together; used by one thread.

    Attributes:
        verified: What was read straight to its place, and is large.
    """

    def __init__(self, tier: Readable, on_taken: Callable[[Load], None] | None = None) -> None:
        """`on_taken`: is told of each load that was read and verified, on any thread."""
        self.verified: list[Verified] = []
        self._tier, self._on_taken = tier, on_taken
        self._key = ""
        self._parts: list[tuple[int, memoryview]] = []
        self._loads: list[list[tuple[Load, int]]] = []  # of each part, with its place in that
        self._small: list[Load] = []  # that lie together, not yet a part
        self._scratch: memoryview | None = None
        self._used = 0

    def add(self, load: Load) -> None:
        """Read this too; may read what was added before. In the order of the file."""
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
        """Read and verify all that was added.

        Raises:
            UnusableSnapshot: a file ends too early, or a block does not match its digest.
            TierUnavailable: the tier refused.
        """
        self._join()
        parts, self._parts, of_parts, self._loads = self._parts, [], self._loads, []
        self._used = 0
        was_verified = bool(parts) and is_verified(self._tier, self._key)

        def take(number: int) -> None:
            # on any thread
            data = parts[number][1]
            for load, at in of_parts[number]:
                size = load.last - load.first
                piece = data if size == len(data) else data[at : at + size]
                load.take(piece, is_verified=was_verified)
                if (verified := load.verified) is not None:
                    self.verified.append(verified)
                if self._on_taken is not None:
                    self._on_taken(load)

        if parts:
            self._tier.read_parts(self._key, parts, take)

    def _add_small(self, load: Load) -> None:
        if self._small:
            first, last = self._small[0].first_byte, self._small[-1]
            behind = last.first_byte + last.last - last.first
            end = load.first_byte + load.last - load.first
            if not 0 <= load.first_byte - behind <= CLOSE_BYTES or end - first > READ_BYTES:
                self._join()
        self._small.append(load)

    def _join(self) -> None:
        """What is small and lies together becomes one part."""
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
        """Memory until the next `read`, which lies as the bytes do in the file."""
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
