"""Cases of a fourth family: one run in several layouts, each going on where the last was stopped.

A pure function of the seed. There is no reference, for other ranks round differently; what must be
true of the data is in `check_reshard.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.campaign.cases import FORK, MICRO_BATCH, SIGKILL, SIGTERM, Case, Settings, Stop
from tests.campaign.drive import Ended, attempt_of
from tests.campaign.watch import Scene

if TYPE_CHECKING:
    from pathlib import Path

    from tests.campaign.launch import Server

ACCUMULATE = 3
CHAINS = (
    (("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("fsdp", 3)),
    (("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("none", 1)),
    (("tp", 4), ("ddp", 2), ("tp", 4)),
)


@dataclass(frozen=True)
class Chain:
    """What one seed stands for: the settings of each leg, and the stop after all but the last."""

    seed: int
    legs: tuple[Settings, ...]
    stops: tuple[Stop, ...]
    launcher: str = FORK

    @property
    def settings(self) -> Settings:
        """Of the first leg; what all have in common."""
        return self.legs[0]

    @property
    def title(self) -> str:
        legs = " -> ".join(f"{leg.parallel} {leg.ranks}" for leg in self.legs)
        return f"{legs}, {self.settings.workers} workers, save every {self.settings.save_every}"

    @property
    def words(self) -> str:
        stops = ", ".join(f"{stop.signal} at {stop.place}" for stop in self.stops)
        return f"{self.title}; {self.launcher}; {stops}"

    def case(self, leg: int) -> Case:
        """A leg alone."""
        return Case(self.seed, self.legs[leg], self.launcher, self.stops[leg : leg + 1])


def draw(seed: int) -> Chain:
    """The chain of this seed."""
    random = Random(f"reshard {seed}")
    chain, workers = CHAINS[seed % len(CHAINS)], random.choice([0, 2])
    common = ACCUMULATE, workers, 0.1, random.choice([1, 2]), random.choice([3, 4])
    legs = tuple(Settings("char_gpt", *leg, *common) for leg in chain)
    last = legs[0].micro_batches - ACCUMULATE
    places = sorted(random.sample(range(2, last), len(legs) - 1))
    return Chain(seed, legs, tuple(_stop(random, place) for place in places))


def _stop(random: Random, place: int) -> Stop:
    signal = random.choices([SIGTERM, SIGKILL], [3, 1])[0]
    target, delay_s = random.choice(["one", "all"]), random.choice([0.0, random.uniform(0, 0.025)])
    return Stop(signal, target, MICRO_BATCH, place, random.random(), delay_s, 0.0)


def run(chain: Chain, server: Server, folder: Path) -> list[Ended]:
    """An attempt a leg; fewer if one has finished or hung."""
    attempts: list[Ended] = []
    for leg, stop in enumerate((*chain.stops, None)):
        scene = Scene(folder, chain.legs[leg].ranks)
        log = folder / f"attempt{leg + 1}.log"
        attempts.append(attempt_of(chain.case(leg), stop, server, scene, log))
        if attempts[-1].finished or attempts[-1].hung:
            break
    return attempts
