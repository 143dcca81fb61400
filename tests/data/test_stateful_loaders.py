"""Loaders that keep their own position: some begin late, some stay loaded, some forget."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.data import datasets as d


class Lazy(DataLoader):
    """`__iter__` is a generator function: the iterator is made with the first batch."""

    at = skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["at"]

    def __iter__(self):
        self.at, skip, self.skip = 0, self.skip, 0
        for batch in super().__iter__():
            self.at += 1
            if self.at > skip:
                yield batch


class LateIterator:
    """As Lazy, and no generator: makes what it reads from when it is first asked for a batch."""

    def __init__(self, loader: Lazy) -> None:
        self.loader, self.batches = loader, None

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is None:
            self.batches = Lazy.__iter__(self.loader)
        return next(self.batches)


class Late(Lazy):
    """Its iterator begins late."""

    def __iter__(self):
        return LateIterator(self)


class Nodes:
    """Draws its order from a sampler's generator, which its state does not hold."""

    batch_sampler = generator = None

    def __init__(self, sampler, *, late: bool = False) -> None:
        self.sampler, self.late, self.at, self.skip = sampler, late, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["at"]

    def __iter__(self):
        self.at, skip, self.skip = 0, self.skip, 0
        indices = iter(self.sampler)
        if self.late:
            return self.rest(indices, skip)
        taken = [index for _, index in zip(range(skip), indices, strict=False)]
        self.at = len(taken)
        return self.rest(indices, 0)

    def rest(self, indices, skip):
        for index in indices:
            self.at += 1
            if skip:
                skip -= 1
                continue
            yield torch.tensor(index)


class Passes(d.StaysLoaded):
    """Not a DataLoader: an iterable that stays where it was loaded."""

    sampler = batch_sampler = generator = None


def of_nodes(late: bool):
    return Nodes(RandomSampler(range(5), generator=torch.Generator().manual_seed(5)), late=late)


def weighted():
    return Nodes(WeightedRandomSampler([1.0, 2, 3, 4, 5], 5), late=True)


MAKES = {
    "lazy": lambda: Lazy(d.Plain(), batch_size=5),
    "lazy, shuffled": lambda: Lazy(d.Plain(), batch_size=5, shuffle=True),
    "lazy, workers": lambda: Lazy(d.Augmented(), batch_size=5, shuffle=True, num_workers=2),
    "late": lambda: Late(d.Plain(), batch_size=5, shuffle=True),
    "own generator": lambda: of_nodes(late=False),
    "own generator, late": lambda: of_nodes(late=True),
    "main generator, late": weighted,
}


@pytest.mark.parametrize("name", MAKES)
def test_it_goes_on_with_the_batches_and_the_randomness_of_the_run_that_was_not_stopped(name):
    make = MAKES[name]
    want = d.straight(make)
    assert want != d.straight(make, seed=8)
    # Saved after its first batch ever, a late iterator that is no generator cannot be told.
    stops = (3, 8, 13) if "workers" in name else range(3 if name == "late" else 1, len(want) + 3)
    for stop in stops:
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("limit", [None, 2], ids=["run out", "left"])
def test_one_that_stays_where_it_was_loaded_begins_its_next_pass_at_its_beginning(limit):
    want = d.straight(Passes, limit=limit)
    stops = range(1, 7) if limit else (1, 3, 23, 24, 25, 40)
    for stop in stops:
        before, after = d.interrupted(Passes, stop, limit=limit)
        assert before + after == want, f"stopped at boundary {stop}"


def test_one_that_draws_to_begin_and_for_each_batch_is_warned_of():
    def make() -> Lazy:
        return Lazy(d.Augmented(), batch_size=5)

    first = d.Run(make(), stop=4)
    with pytest.raises(d.StoppedError):
        first.train()
    second = d.Run(make()).load(first.saved)
    with pytest.warns(UserWarning, match="train: Lazy draws from the main random generators as it"):
        next(iter(second.loader))
