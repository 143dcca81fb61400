"""Streams in workers that persist: what their passes leave behind is restored, or named."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data import datasets as d
from trainckpt.data.state_differences import restored
from trainckpt.format.exactness import How

BATCHES = 6  # of a pass, with two workers


class Ordered(IterableDataset):
    """Its order depends on the passes before; each worker has all samples of a half."""

    def __init__(self):
        self.epoch = 0

    def numbers(self):
        worker = torch.utils.data.get_worker_info()
        order = list(range(worker.id, d.LENGTH, 2))
        random.Random(int(self.epoch)).shuffle(order)
        return map(torch.tensor, order)

    def __iter__(self):
        yield from self.numbers()
        self.epoch += 1


class CountedAtBegin(Ordered):
    def __iter__(self):
        yield from self.numbers()

    def numbers(self):
        self.epoch += 1
        return super().numbers()


class DrawnAtEnd(IterableDataset):
    """Draws once more after its last sample."""

    def __iter__(self):
        for number in range(12):
            yield torch.tensor([number, random.random()])
        random.random()


class ByTensor(Ordered):
    def __init__(self):
        self.epoch = torch.zeros((), dtype=torch.int64)


class ByOtherName(Ordered):
    def __init__(self):
        self.passes = 0

    @property
    def epoch(self):
        return self.passes

    @epoch.setter
    def epoch(self, value):
        self.passes = value


class WithState(ByOtherName):
    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Offset:
    """A collate_fn that adds the number of the batches before."""

    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples) + self.calls


def loader_of(dataset, collate_fn=None, **options):
    options = {"num_workers": 2, "persistent_workers": True, **options}
    return lambda: DataLoader(
        dataset(), 4, collate_fn=None if collate_fn is None else collate_fn(), **options
    )


def resumed(make, stop, limit=None):
    """Return if a resume from this boundary was exact, and what was named at it."""
    want = d.straight(make, limit=limit)
    assert len({str(sorted(row[1] for row in want if row[0] == epoch)) for epoch in (0, 1)}) == 2
    d.seed_all(7)
    run = d.Run(make(), stop=stop, limit=limit)
    with pytest.raises(d.StoppedError):
        run.train()
    run.loader.shutdown()
    d.seed_all(999)
    rest = d.Run(make(), limit=limit).load(run.saved)
    rest.train()
    rest.loader.shutdown()
    named = [
        p for p in restored("train", run.saved["data"], in_place=True) if p.how is How.NOT_KEPT
    ]
    return run.rows + rest.rows == want, " ".join(part.reason for part in named)


BETWEEN = BATCHES + 2  # the boundary that begins the second pass


@pytest.mark.parametrize(
    "stop", [BETWEEN, BETWEEN + 2, pytest.param(BETWEEN - 1, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("dataset", [Ordered, CountedAtBegin, DrawnAtEnd])
def test_counts_and_generators_go_on_as_the_last_pass_left_them(dataset, stop):
    assert resumed(loader_of(dataset), stop) == (True, "")


def test_a_pass_left_near_its_end_waits_for_no_worker_that_has_run_out():
    for limit in range(1, BATCHES):
        assert resumed(loader_of(CountedAtBegin), limit + 1, limit) == (True, "")


def test_so_do_draws_for_a_last_batch_that_is_dropped():
    assert resumed(loader_of(DrawnAtEnd, drop_last=True), BETWEEN)[0]


class BegunByOtherName(ByOtherName):
    def __iter__(self):
        self.passes += 1
        yield from self.numbers()


class Begun(Ordered):
    """Keeps its count in an iterator."""

    def __init__(self):
        self.counter = itertools.count()

    def __iter__(self):
        self.epoch = next(self.counter)
        return self.numbers()


@pytest.mark.parametrize(
    ("dataset", "name", "limit"),
    [
        (ByTensor, "dataset.epoch", None),
        (ByOtherName, "dataset.passes", None),
        (WithState, "dataset.passes", None),
        (Begun, "dataset.counter", None),
        (BegunByOtherName, "dataset.passes", None),
        pytest.param(BegunByOtherName, "dataset.passes", 1, id="left early"),
    ],
)
@pytest.mark.filterwarnings("ignore:train. dataset")
def test_what_else_a_pass_changed_is_named(dataset, name, limit):
    # Python 3.14 pickles no itertools.count, as a fork server would have to.
    make = loader_of(dataset, prefetch_factor=1, multiprocessing_context="fork")
    is_exact, named = resumed(make, BETWEEN if limit is None else limit + 1, limit)
    assert f"{name} in workers that persist" in named
    assert not is_exact


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:train. collate_fn")
def test_a_count_of_a_collate_fn_over_a_stream_is_named(workers):
    make = loader_of(d.Stream, Offset, num_workers=workers, persistent_workers=workers > 0)
    is_exact, named = resumed(make, (2 if workers else 1) * BATCHES + 2)
    assert "collate_fn.calls" in named
    assert not is_exact
