"""Samplers and datasets that work on what their `state_dict` returned and was given."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from tests.data import datasets as d
from trainckpt.data.prefetching import PrefetchingSource


class LiveSampler(Sampler):
    """Shuffles the order of the last pass on; its state is that order, not a copy of it."""

    def __init__(self) -> None:
        self.held = {"order": list(range(d.LENGTH)), "turns": torch.zeros(1, dtype=torch.int64)}

    def __len__(self) -> int:
        return d.LENGTH

    def __iter__(self):
        self.held["turns"] += 1
        random.Random(int(self.held["turns"])).shuffle(self.held["order"])
        return iter(list(self.held["order"]))

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


class LiveStream(d.StatefulStream):
    """Goes through its samples; its state is the dict in which it counts."""

    def __init__(self) -> None:
        self.held = {"at": 0}

    def __iter__(self):
        while self.held["at"] < d.LENGTH:
            self.held["at"] += 1
            yield torch.tensor(self.held["at"] - 1)
        self.held["at"] = 0

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


class LiveIterable(d.Countdown):
    """Not a DataLoader; its state is the dict in which it counts."""

    sampler = batch_sampler = generator = None

    def __init__(self) -> None:
        self.held = {"left": 9}

    def __iter__(self):
        while self.held["left"] > 0:
            self.held["left"] -= 1
            yield torch.tensor(self.held["left"])
        self.held["left"] = 9

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


class TwoAhead:
    """A reader that fetches two batches before it returns the first."""

    elsewhere = "nobody deals it"

    def read(self, open_it, *, resumed):
        batches = open_it()
        held = [batch for _, batch in zip(range(2), batches, strict=False)]
        for batch in batches:
            held.append(batch)
            yield held.pop(0)
        yield from held

    def goes_on(self):
        """Nothing has an epoch."""

    def was_over(self):
        """Nothing counts."""

    def state(self):
        return {}

    def load(self, state):
        """Nothing is remembered."""

    def facts(self):
        return {}


class ReadAhead:
    """A loader that is read through it."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __iter__(self):
        return TwoAhead().read(lambda: iter(self.loader), resumed=False)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, attribute):
        return getattr(self.loader, attribute)

    def __trainckpt_source__(self, name, report):
        return PrefetchingSource(TwoAhead(), self.loader, name, report)


MAKES = {
    "sampler": lambda: DataLoader(d.Augmented(), 4, sampler=LiveSampler()),
    "sampler, kept workers": lambda: DataLoader(
        d.Augmented(), 4, sampler=LiveSampler(), num_workers=2, persistent_workers=True
    ),
    "sampler, ahead": lambda: ReadAhead(DataLoader(d.Augmented(), 4, sampler=LiveSampler())),
    "stream": lambda: DataLoader(LiveStream(), batch_size=4),
    "iterable": LiveIterable,
}


STOPS = {name: (3, 9) if "workers" in name else range(1, 22) for name in MAKES}


@pytest.mark.parametrize("name", MAKES)
def test_a_state_that_is_worked_on_is_kept_as_it_was(name):
    want = d.straight(MAKES[name])
    for stop in STOPS[name]:
        before, after = d.interrupted(MAKES[name], stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("name", MAKES)
def test_what_was_loaded_may_be_loaded_again(name):
    want = d.straight(MAKES[name])
    d.seed_all(7)
    first = d.Run(MAKES[name](), stop=9)
    with pytest.raises(d.StoppedError):
        first.train()
    first.loader.shutdown()
    for _ in range(2):
        run = d.Run(MAKES[name]()).load(first.saved)
        assert first.rows + run.train() == want
        run.loader.shutdown()
