"""A fetch beside a launch leaves the disk to the launch until the launch waits for it."""

from __future__ import annotations

import queue
import threading

import pytest

from trainckpt.snapshot.fetch import GENTLE_BYTES, GENTLE_PARTS, NUM_PARTS, Blocks


def out(blocks):
    """Take all blocks that are free now."""
    found = []
    while True:
        try:
            found.append(blocks.take(timeout_s=0))
        except queue.Empty:
            return found


def test_few_reads_are_in_flight_until_the_launch_waits_and_then_all():
    awaited = threading.Event()
    blocks = Blocks(64 * GENTLE_BYTES, GENTLE_BYTES, NUM_PARTS, awaited)
    taken = out(blocks)
    assert len(taken) == GENTLE_PARTS
    blocks.give(taken.pop())
    taken += out(blocks)
    assert len(taken) == GENTLE_PARTS
    awaited.set()
    blocks.give(taken.pop())
    assert len(taken + out(blocks)) == NUM_PARTS


@pytest.mark.parametrize(("num_bytes", "num"), [(10, 1), (3 * GENTLE_BYTES, 3)])
def test_a_fetch_that_has_the_disk_alone_reads_all_at_once(num_bytes, num):
    taken = out(Blocks(num_bytes, GENTLE_BYTES, NUM_PARTS, None))
    assert [len(block) for block in taken] == [GENTLE_BYTES] * num
