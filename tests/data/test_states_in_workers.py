"""A stream with a state, in workers: they go on by their states, or load the pass again."""

from __future__ import annotations

import multiprocessing
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.state_differences import restored
from trainckpt.format.exactness import How

BATCH = 4


class Rows(IterableDataset):
    """Each worker's share of the rows, begun at its position; counts what all workers read."""

    def __init__(self, number=120):
        self.number, self.position, self.first = number, 0, 0
        self.reads = multiprocessing.Value("i", 0)

    def own(self):
        worker = get_worker_info()
        return range(worker.id, self.number, worker.num_workers)

    def __iter__(self):
        first, self.first = self.first, 0
        for position, row in enumerate(self.own()[first:], first + 1):
            self.position = position
            with self.reads.get_lock():
                self.reads.value += 1
            yield torch.tensor([row, random.randrange(1000)])

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.first = self.position = state["position"]


class Uneven(Rows):
    """The first worker runs out long before the others."""

    def own(self):
        rows = super().own()
        return rows[: 5 * BATCH] if get_worker_info().id == 0 else rows


class Buffered(Rows):
    """Its shuffle buffer is not in its state."""

    def __iter__(self):
        buffer = []
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        yield from buffer


class Failing(Rows):
    """Has no state once it has begun."""

    def state_dict(self):
        if self.position:
            raise LookupError("ask before the pass")
        return super().state_dict()


def makes(kind, workers):
    return lambda: DataLoader(kind(), BATCH, num_workers=workers)


def resumed(make, stop):
    """Return the rows of both attempts, the resumed dataset, and what its resume reported."""
    d.seed_all(7)
    first = d.Run(make(), stop=stop)
    with pytest.raises(d.StoppedError):
        first.train()
    first.loader.shutdown()
    d.seed_all(999)
    parts = [one.how for one in restored("train", first.saved["data"], in_place=True)]
    second = d.Run(make())
    second.loader = TrackedLoader(
        second.plain,
        name="train",
        on_boundary=second.boundary,
        before_first_fetch=second.restore,
        report=lambda part: parts.append(part.how),
    )
    second.load(first.saved)
    rows = first.rows + second.train()
    second.loader.shutdown()
    return rows, second.plain.dataset, parts


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_it_goes_on_by_the_states_of_its_workers(workers):
    make = makes(Rows, workers)
    want = d.straight(make)
    in_epoch = sum(row[0] == 0 for row in want)
    for stop in (25, in_epoch + 27):
        rows, dataset, parts = resumed(make, stop)
        assert rows == want
        assert parts == []
        trained = stop - 1 - (in_epoch if stop > in_epoch else 0)
        passes = 3 - (stop > in_epoch)
        again = dataset.reads.value - (passes * 120 - trained * BATCH)
        assert 0 < again <= 8 * workers * BATCH


def test_near_the_start_of_a_pass_the_pass_is_loaded_again():
    rows, _, parts = resumed(makes(Rows, 2), 6)
    assert rows == d.straight(makes(Rows, 2))
    assert parts == [How.REPLAYED]


@pytest.mark.parametrize("kind", [Buffered, Uneven, Failing])
def test_what_the_states_do_not_lead_to_is_loaded_again(kind):
    want = d.straight(makes(kind, 2))
    rows, _, parts = resumed(makes(kind, 2), 22)
    assert rows == want
    assert parts == [] if kind is Uneven else parts == [How.REPLAYED]
