"""What passes by is the file that the manifest names, or is found out, wherever a bit is wrong."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from trainckpt.format import digest_check, shard_file
from trainckpt.format.digest import digest, digests_by_block
from trainckpt.format.manifest import FileEntry
from trainckpt.format.shard_file import Region, ShardHeader

SIZES = [20_000, 8192, 4096, 100, 0, 1]


def shard_of(sizes, seed=0, *, by_block=True):
    """A shard file with regions of these sizes; not by block: as of format 1."""
    rng = random.Random(seed)
    regions = shard_file.lay_out(
        [Region(f"t{i}", "U8", (0,), (size,), (size,)) for i, size in enumerate(sizes)]
    )
    data = {region.key: rng.randbytes(region.num_bytes) for region in regions}
    digests = {
        r.key: digests_by_block(memoryview(data[r.key]), shard_file.block_bytes(r.num_bytes))
        if by_block
        else digest(data[r.key])
        for r in regions
    }
    header = shard_file.reserve(ShardHeader(0, 1, regions))
    header = shard_file.with_digests(header, digests)
    head = shard_file.build(header)
    return head, head + b"".join(data[region.key] for region in regions)


HEAD, FILE = shard_of(SIZES)
ENTRY = FileEntry("rank00000.safetensors", len(FILE), "", digest(HEAD))
WHOLE = replace(ENTRY, digest=digest(FILE))


def is_right(data, entry, cuts=()):
    """What is found when the bytes pass by in pieces."""
    check, bounds = digest_check.check_of(entry), [0, *sorted(cuts), len(data)]
    pieces = [memoryview(data)[a:b] for a, b in itertools.pairwise(bounds)]
    for piece in pieces:
        check.update(piece)
    return check.is_right


@pytest.mark.parametrize("entry", [ENTRY, WHOLE], ids=["head", "whole"])
def test_the_file_is_right_in_pieces_of_any_length(entry):
    rng = random.Random(1)
    assert digest_check.is_file(memoryview(FILE), entry)
    assert is_right(FILE, entry, range(1, 40))
    for _ in range(200):
        assert is_right(FILE, entry, [rng.randrange(len(FILE)) for _ in range(rng.randrange(9))])


@pytest.mark.parametrize("entry", [ENTRY, WHOLE], ids=["head", "whole"])
def test_a_wrong_bit_anywhere_is_found(entry):
    for at in [*range(0, len(FILE), 31), len(FILE) - 1]:
        wrong = bytearray(FILE)
        wrong[at] ^= 1 << at % 8
        assert not is_right(bytes(wrong), entry, [at // 2, at]), at


@pytest.mark.parametrize("entry", [ENTRY, WHOLE], ids=["head", "whole"])
def test_what_is_too_short_too_long_or_another_file_is_found(entry):
    for end in (0, 5, 8, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, len(FILE) - 1):
        assert not is_right(FILE[:end], entry), end
    assert not is_right(FILE + b"\0", entry)
    assert not is_right(shard_of(SIZES, seed=1)[1], entry)
    assert not is_right(b"\xff" * len(FILE), entry)


def test_a_head_that_is_right_and_names_other_bytes_than_it_has_is_no_file():
    assert not is_right(FILE, replace(ENTRY, num_bytes=len(FILE) + 1))
    short = replace(ENTRY, num_bytes=len(FILE) - 4096)
    assert not is_right(FILE[:-4096], short)
    prefix = (2**40).to_bytes(8, "little")  # a head of a terabyte is not waited for
    assert not is_right(prefix + FILE[8:], ENTRY)


def test_a_file_without_data_is_its_head():
    head, data = shard_of([0, 0])
    entry = FileEntry("rank00000.safetensors", len(data), "", digest(head))
    assert head == data
    assert is_right(data, entry)
    assert not is_right(data + b"x", entry)


def test_a_file_with_one_digest_for_each_region_is_checked_by_those():
    head, data = shard_of(SIZES, by_block=False)
    entry = replace(ENTRY, num_bytes=len(data), header_digest=digest(head))
    assert is_right(data, entry)
    assert is_right(data, entry, range(0, len(data), 777))
    for at in range(0, len(data), 777):
        assert not is_right(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], entry)
