"""A file cut so that each part can be verified by itself."""

from __future__ import annotations

import math
import random

import pytest

from trainckpt.format import digest, shard_file
from trainckpt.format.shard_file import MIN_BLOCK_BYTES, Region, ShardHeader
from trainckpt.snapshot.parts import cut, cut_at_blocks

SIZES = [0, 1, 7, 4096, MIN_BLOCK_BYTES, MIN_BLOCK_BYTES + 4, 40_000, 5 * MIN_BLOCK_BYTES, 300_000]
LARGE = MIN_BLOCK_BYTES * shard_file.MAX_BLOCKS + 1  # its blocks are of twice as many bytes


def file_of(*sizes):
    """A shard file with a region of each so many bytes: its header, and its bytes."""
    made = random.Random(1)
    regions = shard_file.lay_out(
        [Region(f"t{i}", "U8", (0,), (size,), (size,)) for i, size in enumerate(sizes)]
    )
    data = [made.randbytes(region.num_bytes) for region in regions]
    regions = [
        region.digested(
            digest.digests_by_block(memoryview(each), shard_file.block_bytes(region.num_bytes))
        )
        for region, each in zip(regions, data, strict=True)
    ]
    head = shard_file.build(ShardHeader(0, 1, tuple(regions), 0))
    whole = head + b"".join(data)
    return shard_file.parse(head, "a file", file_bytes=len(whole)), bytearray(whole)


@pytest.mark.parametrize("size", [MIN_BLOCK_BYTES, 3 * MIN_BLOCK_BYTES - 1, 1 << 20])
def test_parts_hold_the_whole_file_once_and_none_is_too_long(size):
    header, whole = file_of(*SIZES)
    parts = cut_at_blocks(header, "a file", size)
    assert [p.first_byte for p in parts] == [
        sum(p.num_bytes for p in parts[:n]) for n in range(len(parts))
    ]
    assert sum(part.num_bytes for part in parts) == len(whole)
    assert all(0 < part.num_bytes <= size for part in parts)
    full = [p for p in parts[:-1] if p.loads and p.num_bytes > size - MIN_BLOCK_BYTES]
    assert len(full) >= len(parts) - math.ceil(header.header_bytes / size) - 1


@pytest.mark.parametrize("size", [MIN_BLOCK_BYTES, 1 << 20])
def test_any_byte_that_is_another_is_found_in_its_part_alone(size):
    header, whole = file_of(*SIZES)
    parts = cut_at_blocks(header, "a file", size)

    def bad():
        return [
            p for p in parts
            if not p.is_good(memoryview(whole)[p.first_byte : p.first_byte + p.num_bytes])
        ]  # fmt: skip

    assert bad() == []
    for at in random.Random(2).sample(range(header.header_bytes, len(whole)), 40):
        whole[at] ^= 1
        (found,) = bad()
        assert found.first_byte <= at < found.first_byte + found.num_bytes
        whole[at] ^= 1


def test_a_block_that_is_longer_than_a_part_cannot_be_verified_so():
    header, _ = file_of(10, LARGE)
    assert cut_at_blocks(header, "a file", MIN_BLOCK_BYTES) is None
    assert cut_at_blocks(header, "a file", 2 * MIN_BLOCK_BYTES) is not None


def test_without_digests_parts_are_all_of_one_length_but_the_last():
    assert [tuple(part) for part in cut(10, 4)] == [(0, 4, ()), (4, 4, ()), (8, 2, ())]
    assert list(cut(0, 4)) == []
