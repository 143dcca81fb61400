"""Parts: what of a shard file is read in one go, and the digests that it can be verified by there.

Cut between blocks, each part is verified by itself, whichever thread brings it, in any order, while
a cache still holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainckpt.snapshot.blocks import Found, Load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.shard_file import ShardHeader


class Part(NamedTuple):
    """Bytes that lie together in a file, and the runs of blocks by which they can be verified."""

    first_byte: int
    num_bytes: int
    loads: tuple[Load, ...] = ()

    def is_good(self, data: memoryview) -> bool:
        """Whether its bytes match their digests."""
        places = (load.first_byte - self.first_byte for load in self.loads)
        return all(
            load.is_good(data[at : at + load.last - load.first])
            for load, at in zip(self.loads, places, strict=True)
        )


def cut(num_bytes: int, size: int) -> Iterator[Part]:
    """So many bytes, in parts of `size`; the last may have fewer."""
    for at in range(0, num_bytes, size):
        yield Part(at, min(size, num_bytes - at))


def cut_at_blocks(header: ShardHeader, key: str, size: int) -> list[Part] | None:
    """A whole file, in parts of at most `size`, and behind its head no block in two of them.

    `key`: of the file. None: a block is longer than that. Regions without bytes are in none.
    """
    parts, together, room = list(cut(header.header_bytes, size)), list[Load](), size
    for region in header.regions:
        place = Found(key, header.header_bytes + region.first_byte, region)
        block, done = region.bytes_per_digest or 1, 0
        if min(block, region.num_bytes) > size:
            return None
        while left := region.num_bytes - done:
            num_bytes = left if left <= room else room // block * block
            if num_bytes:
                together.append(Load(place, done, done + num_bytes, None))
                room, done = room - num_bytes, done + num_bytes
            else:
                parts.append(_joined(together))
                together, room = [], size
    return [*parts, _joined(together)] if together else parts


def _joined(loads: list[Load]) -> Part:
    return Part(loads[0].first_byte, sum(load.last - load.first for load in loads), tuple(loads))
