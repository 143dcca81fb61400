"""However often the number of data ranks changes, each epoch trains its samples exactly once.

All ranks of a run are simulated in one process, each with its own TrackedLoader, through random
scenarios: stops at any boundary, inside and outside optimizer windows, which may straddle the ends
of epochs; then a resume in the same world, exact, or in another one, from any rank's state.

    after a resume in another world the lines at or after the window's start are dropped

What then stands in the merged log is checked against the order of a single rank.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainckpt.data.loader import TrackedLoader
from trainckpt.data.sampler import set_epoch


class StoppedError(Exception):
    """Raised at the boundary where all ranks stop."""


@dataclass(frozen=True)
class World:
    ranks: int
    batch: int
    accumulate: int


@dataclass
class Script:
    """What stays when the world changes."""

    length: int
    epochs: int
    shuffle: bool
    seed: int
    sampler_drops: bool
    loader_drops: bool
    straddles: bool  # windows go on over the end of an epoch
    evaluates: bool  # a boundary after each epoch
    form: str  # how the sampler gets into the DataLoader
    workers: int = 0

    def loader(self, world: World, rank: int) -> DataLoader:
        data = range(self.length)
        sampler = DistributedSampler(
            data, world.ranks, rank, self.shuffle, self.seed, self.sampler_drops
        )
        workers = {"num_workers": self.workers}
        if self.workers:
            workers["multiprocessing_context"] = "fork"
            workers["persistent_workers"] = self.seed % 2 == 0
        if self.form == "ids":
            return DataLoader(data, batch_size=None, sampler=sampler, **workers)
        batches = BatchSampler(sampler, world.batch, self.loader_drops)
        if self.form == "batch sampler":
            return DataLoader(data, batch_sampler=batches, **workers)
        return DataLoader(
            data, world.batch, sampler=sampler, drop_last=self.loader_drops, **workers
        )

    def trained(self, deal: Deal) -> int:
        """How many ids all ranks have trained of the epoch once the deal is over."""
        rest = self.length - deal.base
        shared_up = not (self.sampler_drops or (deal.base and self.loader_drops))
        each = -(-rest // deal.ranks) if shared_up else rest // deal.ranks
        if self.loader_drops:
            each -= each % deal.batch
        return deal.base + each * deal.ranks

    def order(self, epoch: int) -> list[int]:
        alone = DistributedSampler(range(self.length), 1, 0, self.shuffle, self.seed)
        alone.set_epoch(epoch)
        return list(alone)


@dataclass(frozen=True)
class Deal:
    """A world takes the rest of an epoch, of which `base` ids were trained before."""

    ranks: int
    batch: int
    base: int = 0


@dataclass
class Place:
    """What the owner of the loader keeps: its own part of a snapshot, and of a window's start."""

    epoch: int = 0
    over: bool = False  # the epoch's pass; its evaluation is to come
    lines: int = 0
    ends: dict[int, tuple[Deal, int]] = field(default_factory=dict)  # of epochs: padding
    deal: Deal | None = None


class Rank:
    """One rank's training loop."""

    def __init__(self, script: Script, world: World, rank: int, log: list, place: Place) -> None:
        self.script, self.world, self.log = script, world, log
        self.place = self.window = place
        self.micro = self.left = 0
        self.ends = place.ends
        self.plain = script.loader(world, rank)
        self.loader = TrackedLoader(self.plain, name="train", on_boundary=self.boundary)

    def train(self, stop: int) -> bool:
        """Train up to boundary `stop`; True if the run ended before."""
        self.left = stop
        try:
            self.epochs()
        except StoppedError:
            return False
        finally:
            self.loader.shutdown()
        return True

    def epochs(self) -> None:
        for epoch in range(self.place.epoch, self.script.epochs):
            set_epoch(self.plain, epoch)
            going_on = epoch == self.place.epoch
            deal = Deal(self.world.ranks, self.world.batch)
            over, self.deal = going_on and self.place.over, (going_on and self.place.deal) or deal
            if over:
                self.loader.skip_passes(1)
            self.epoch, self.over = epoch, False
            for batch in self.loader:
                self.log.append((epoch, torch.as_tensor(batch).reshape(-1).tolist()))
                self.micro = (self.micro + 1) % self.world.accumulate
            if not over:
                self.ends = {**self.ends, epoch: (self.deal, self.loader.padding)}
                self.micro *= self.script.straddles
            if self.script.evaluates:
                self.over = True
                self.boundary()

    def boundary(self) -> None:
        in_pass = self.loader.in_pass or self.over
        deal = self.deal if in_pass else None
        here = Place(self.epoch, self.over, len(self.log), self.ends, deal)
        if self.micro == 0:
            is_old = self.loader.state()["elsewhere"]  # nothing trained since: the old world's deal
            self.window = replace(here, deal=deal and self.window.deal) if is_old else here
            self.loader.record_window_start()
        if self.left == 0:
            self.place, self.saved = here, self.loader.state()
            raise StoppedError
        self.left -= 1


def resumed(ranks: list[Rank]) -> list[Rank]:
    """Return the same ranks in new processes, each from its own state."""
    found = []
    for number, old in enumerate(ranks):
        new = Rank(old.script, old.world, number, old.log, old.place)
        new.window, new.micro = old.window, old.micro
        new.loader.load_state(old.saved)
        found.append(new)
    return found


def resharded(ranks: list[Rank], world: World, chosen: int, merged: list) -> list[Rank]:
    """Return the ranks of another world, from the state of one old rank; merge the log."""
    for old in ranks:
        assert old.saved["window"] == ranks[0].saved["window"]
        merged += old.log[: old.window.lines]
    start, script = ranks[0].window, ranks[0].script
    deal = start.deal
    if deal is not None and (deal.ranks, deal.batch) != (world.ranks, world.batch):
        trained = sum(len(ids) for epoch, ids in merged if epoch == start.epoch)
        if trained < script.trained(deal):
            deal = Deal(world.ranks, world.batch, trained)
    place = Place(start.epoch, start.over, 0, start.ends, deal)
    found = [Rank(script, world, number, [], place) for number in range(world.ranks)]
    for new in found:
        assert new.loader.differences_in_other_world(ranks[chosen].saved) == []
        new.loader.load_in_other_world(ranks[chosen].saved)
        new.window = replace(place, deal=start.deal)
    return found


def any_script(draw: random.Random, workers: int) -> Script:
    form = draw.choice(["sampler", "sampler", "batch sampler", "ids"])
    return Script(
        length=draw.randint(1, draw.choice([12, 40, 90])),
        epochs=draw.randint(1, 3),
        shuffle=draw.random() < 0.8,
        seed=draw.randint(0, 9),
        sampler_drops=draw.random() < 0.25,
        loader_drops=draw.random() < 0.25 and form != "ids",
        straddles=draw.random() < 0.6,
        evaluates=draw.random() < 0.5,
        form=form,
        workers=workers,
    )


def any_world(draw: random.Random, script: Script) -> World:
    batch = 1 if script.form == "ids" else draw.randint(1, 4)
    return World(draw.randint(1, 5), batch, draw.choice([1, 1, 2, 3, 4]))


def scenario(seed: int, workers: int = 0) -> None:
    draw = random.Random(seed)
    script = any_script(draw, workers)
    world, merged = any_world(draw, script), []
    ranks = [Rank(script, world, number, [], Place()) for number in range(world.ranks)]
    ended: set[bool] = set()
    for _ in range(draw.randint(1, 8)):
        stop = draw.choice([0, draw.randint(0, 6), draw.randint(0, 6), draw.randint(0, 20)])
        ended = {rank.train(stop) for rank in ranks}
        assert len(ended) == 1, "ranks reach equally many boundaries"
        if ended == {True}:
            break
        if draw.random() < 0.4:
            ranks = resumed(ranks)
        else:
            world = draw.choice([world, any_world(draw, script)])
            ranks = resharded(ranks, world, draw.randrange(len(ranks)), merged)
    if ended != {True}:
        assert {rank.train(10**9) for rank in ranks} == {True}
    for rank in ranks:
        merged += rank.log
    for epoch in range(script.epochs):
        seen = Counter(sample for at, ids in merged if at == epoch for sample in ids)
        check(script, epoch, seen, *ranks[0].ends[epoch])


def check(script: Script, epoch: int, seen: Counter, deal: Deal, num_padding: int) -> None:
    order = script.order(epoch)
    assert num_padding < deal.ranks
    padding = (order * deal.ranks)[:num_padding]
    assert seen.total() == script.trained(deal)
    assert seen == Counter(order[: seen.total()]) + Counter(padding)
    if not (script.sampler_drops or script.loader_drops):
        assert seen == Counter(order) + Counter(padding)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 400), marks=pytest.mark.long)]
)
def test_every_epoch_trains_its_samples_once_in_whatever_worlds(seeds):
    """And the padding that the loaders report, or what drop_last leaves of it at most once."""
    for seed in seeds:
        scenario(seed)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.long)])
def test_workers_change_nothing_of_it(seeds):
    """New ones in each pass, and such as are kept."""
    for seed in seeds:
        scenario(seed, workers=2)
