"""Of what was written to since it was read, just those blocks are proved that it lies in."""

from __future__ import annotations

import random

import pytest

from trainckpt.format.digest import Verified
from trainckpt.state.given import _blocks

BLOCK, SIZE = 100, 950
TILE = Verified(0, SIZE, BLOCK, "")


@pytest.mark.parametrize(
    ("before", "written", "blocks"),
    [
        (0, [], []),
        (0, [(0, SIZE)], [(0, 10)]),
        (0, [(0, 1), (949, 950)], [(0, 1), (9, 10)]),
        (0, [(10, 20), (30, 40), (99, 100)], [(0, 1)]),
        (0, [(90, 110), (150, 160), (200, 201)], [(0, 3)]),
        (0, [(90, 110), (150, 160), (300, 301)], [(0, 2), (3, 4)]),
        (500, [(0, 500)], []),
        (500, [(450, 501), (1449, 3000)], [(0, 1), (9, 10)]),
        (0, [(SIZE, 2000)], []),
    ],
)
def test_each_block_is_proved_once(before, written, blocks):
    found = [run for run in _blocks(TILE, before, written) if run[0] < run[1]]
    assert found == blocks


def test_every_byte_that_was_written_lies_in_a_block_that_is_proved_and_no_other_block_is():
    drawn = random.Random(5)
    for _ in range(200):
        before = drawn.choice([0, 30, 400])
        ends = sorted(drawn.sample(range(before + SIZE + 200), 2 * drawn.randint(1, 6)))
        written = list(zip(ends[::2], ends[1::2], strict=True))
        expected = {
            (byte - before) // BLOCK
            for begin, end in written
            for byte in range(begin, end)
            if 0 <= byte - before < SIZE
        }
        runs = list(_blocks(TILE, before, written))
        found = [block for first, last in runs for block in range(first, last)]
        assert found == sorted(expected)
