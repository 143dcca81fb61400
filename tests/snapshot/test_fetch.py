"""What is read beside a launch leaves the disk to it, until the launch waits for that."""

from __future__ import annotations

import queue
import threading

import pytest

from trainckpt.snapshot.fetch import GENTLE_BYTES, GENTLE_PARTS, Beside, Blocks
from trainckpt.tiers.queue_depth import FIRST


def out(blocks):
    """All blocks that can be had now."""
    found = []
    while True:
        try:
            found.append(blocks.take(timeout_s=0))
        except queue.Empty:
            return found


def test_few_reads_are_on_their_way_until_it_is_awaited_then_all():
    awaited = threading.Event()
    blocks = Blocks(64 * GENTLE_BYTES, GENTLE_BYTES, GENTLE_PARTS, Beside(awaited))
    taken = out(blocks)
    assert len(taken) == FIRST
    blocks.give(taken.pop())
    taken += out(blocks)
    assert len(taken) == FIRST
    awaited.set()
    blocks.give(taken.pop())
    assert len(taken + out(blocks)) == GENTLE_PARTS


@pytest.mark.parametrize(("num_bytes", "num"), [(10, 1), (3 * GENTLE_BYTES, 3)])
def test_who_has_the_disk_alone_reads_all_at_once(num_bytes, num):
    taken = out(Blocks(num_bytes, GENTLE_BYTES, GENTLE_PARTS, None))
    assert [len(block) for block in taken] == [GENTLE_BYTES] * num


def test_what_one_file_has_shown_of_a_place_holds_for_the_next():
    beside = Beside(threading.Event())
    Blocks(64 * GENTLE_BYTES, GENTLE_BYTES, GENTLE_PARTS, beside)
    beside.depth.measured(1e6)
    following = Blocks(64 * GENTLE_BYTES, GENTLE_BYTES, GENTLE_PARTS, beside)
    assert len(out(following)) == 2 * FIRST
