"""Parts: what of a shard file is read in one go, and the digests that it can be verified by there.

Cut between blocks, each part is verified by itself, whichever thread brings it, in any order, while
a cache still holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainckpt.format import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.shard_file import Region, ShardHeader


class Stretch(NamedTuple):
    """Blocks of one region, one behind the other.

    Attributes:
        first_byte: In the file.
        num_bytes: Of all of them.
        block: Bytes of each; the last may have fewer.
        digests: Of each, end to end.
    """

    first_byte: int
    num_bytes: int
    block: int
    digests: str


class Part(NamedTuple):
    """Bytes that lie together in a file, and what of them can be verified."""

    first_byte: int
    num_bytes: int
    stretches: tuple[Stretch, ...] = ()

    def is_good(self, data: memoryview) -> bool:
        """Whether its bytes match their digests."""
        for first_byte, num_bytes, block, digests in self.stretches:
            at = first_byte - self.first_byte
            if digest.digests_by_block(data[at : at + num_bytes], block) != digests:
                return False
        return True


def cut(num_bytes: int, size: int) -> Iterator[Part]:
    """So many bytes, in parts of `size`; the last may have fewer."""
    for at in range(0, num_bytes, size):
        yield Part(at, min(size, num_bytes - at))


def cut_at_blocks(header: ShardHeader, size: int) -> list[Part] | None:
    """A whole file, in parts of at most `size`, and behind its head no block in two of them.

    None: a block is longer than that. Regions without bytes are in none of them.
    """
    parts, together, room = list(cut(header.header_bytes, size)), list[Stretch](), size
    for region in header.regions:
        block, done = region.bytes_per_digest or 1, 0
        if min(block, region.num_bytes) > size:
            return None
        while left := region.num_bytes - done:
            num_bytes = left if left <= room else room // block * block
            if num_bytes:
                together.append(_stretch(header, region, done, num_bytes))
                room, done = room - num_bytes, done + num_bytes
            else:
                parts.append(_joined(together))
                together, room = [], size
    return [*parts, _joined(together)] if together else parts


def _stretch(header: ShardHeader, region: Region, at: int, num_bytes: int) -> Stretch:
    block = region.bytes_per_digest
    first, num = at // block, -(-num_bytes // block)
    digests = region.digest[first * digest.NUM_HEX : (first + num) * digest.NUM_HEX]
    return Stretch(header.header_bytes + region.first_byte + at, num_bytes, block, digests)


def _joined(stretches: list[Stretch]) -> Part:
    return Part(stretches[0].first_byte, sum(s.num_bytes for s in stretches), tuple(stretches))
