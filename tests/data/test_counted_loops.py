"""Loops that count the batches of a resumed pass from 0 are found."""

from __future__ import annotations

import pytest

from trainckpt.data.counted_loops import counter_of


class Batches:
    """An iterator that looks for the loop around it at its first batch."""

    def __init__(self):
        self.found = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.found is None:
            self.found = counter_of(self)
        return 0


def passed_on(batches):
    yield from batches


@pytest.mark.parametrize(
    ("around", "counter"),
    [
        (enumerate, "enumerate"),
        (lambda batches: enumerate(passed_on(batches)), "enumerate"),
        (lambda batches: zip(range(9), batches, strict=False), "zip"),
        (lambda batches: enumerate(batches, 3), ""),
        (lambda batches: zip(batches, batches, strict=False), ""),
        (iter, ""),
    ],
    ids=["enumerate", "over a generator", "zip", "from another number", "of batches", "plain"],
)
def test_the_counter_around_an_iterator_is_found(around, counter):
    batches, other = Batches(), enumerate([1, 2])
    next(around(batches))
    assert batches.found == counter
    assert next(other) == (0, 1)
