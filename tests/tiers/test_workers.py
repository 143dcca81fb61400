"""Calls made by a few threads: what failed is raised, and then nothing is kept of them."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from trainckpt.tiers.workers import Workers


class Memory:
    """What a call works on."""


def fail(memory):
    raise OSError(f"not {type(memory).__name__}")


def made(settle):
    """Weak references to the memory of calls of which one failed."""
    found = []
    with pytest.raises(OSError, match="not Memory"), Workers(2, "test") as workers:  # noqa: PT012
        for number in range(5):
            memory = Memory()
            found.append(weakref.ref(memory))
            workers.submit(partial(fail if number == 3 else id, memory))
            del memory
        settle(workers)
    return found


@pytest.mark.parametrize(
    "settle", [Workers.settle, lambda workers: workers.settle_first(5)], ids=["all", "first"]
)
def test_what_failed_keeps_no_memory_of_the_calls(settle):
    gc.disable()  # only the collector finds what is in a circle, and it may come late
    try:
        assert [reference() for reference in made(settle)] == [None] * 5
    finally:
        gc.enable()
