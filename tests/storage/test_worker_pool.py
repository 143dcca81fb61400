"""Calls made by a few threads: what failed is raised, and then nothing is kept of them."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from trainckpt.storage.worker_pool import SerialWorker, Workers


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


@pytest.mark.parametrize(
    "settle",
    [Workers.settle, lambda workers: workers.settle_first(100), lambda workers: workers.settle(30)],
    ids=["all", "first", "most"],
)
def test_who_waits_is_woken_when_that_is_over_and_not_for_each_call(settle):
    """Each time it would take the core from the very threads that it waits for."""
    with Workers(2, "test") as workers:
        woken, wake = [], workers._changed.notify_all
        workers._changed.notify_all = lambda: (woken.append(workers._done), wake())
        made = []
        for number in range(100):
            workers.submit(partial(made.append, number))
        settle(workers)
        assert len(woken) <= 1
        workers.settle()
    assert sorted(made) == list(range(100))


def test_calls_in_turn_are_all_made_whatever_fails_and_nothing_is_kept_of_them():
    memory, made = Memory(), []
    found = weakref.ref(memory)
    gc.disable()
    try:
        with SerialWorker("test") as calls:
            first = calls.submit(partial(fail, memory))
            number = calls.submit(lambda: made.append(1) or len(made))
            last = calls.submit(partial(fail, memory))
            del memory
        assert number.result() == 1
        for failed in (first, last):
            with pytest.raises(OSError, match="not Memory"):
                failed.result()
        del first, last, failed
        assert found() is None
    finally:
        gc.enable()
