"""Cases of a third family: the layouts whose tensors are cut, on 1 to 4 ranks.

A pure function of the seed; stopped as the cases of `cases` are. Each layout has its moments: with
accumulation 3 two of three micro-batches leave gradients that are not reduced yet, under FSDP in
no parameter's `.grad`; with 3 ranks no tensor is cut into equal parts.
"""

from __future__ import annotations

from random import Random

from tests.campaign import cases
from tests.campaign.cases import FORK, TORCHRUN, Case, Settings

ACCUMULATE, DROPOUT = 3, 0.1
TORCHRUN_SHARE = 0.05
RANKS = {1: 0.5, 2: 2.0, 3: 1.0, 4: 2.0}  # with their weights

TABLE = tuple(
    Settings("char_gpt", parallel, ranks, ACCUMULATE, workers, DROPOUT, 1 + (ranks + shift) % 2, 4)
    for shift, parallel in enumerate(("fsdp", "hsdp", "tp"))
    for ranks in RANKS
    for workers in (0, 2)
)


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(f"layouts {seed}")
    settings = random.choices(TABLE, [RANKS[row.ranks] for row in TABLE])[0]
    launcher = TORCHRUN if random.random() < TORCHRUN_SHARE else FORK
    number = random.choices([1, 2, 3], [4, 4, 2])[0]
    stops = [cases._stop(random, settings, launcher) for _ in range(number)]
    return Case(seed, settings, launcher, tuple(sorted(stops, key=lambda stop: stop.place)))
