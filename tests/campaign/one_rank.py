"""Cases of another family: `trainckpt run`, 2, 4 and 8 ranks, SIGTERM to one rank alone.

A pure function of the seed, as those of `cases`. Half of the ten cases in a row have 2 ranks, three
have 4, two have 8. The micro-batch that the signal falls into is often the first or the last one
of a window or an epoch; now and then the signal comes while the ranks still start.
"""

from __future__ import annotations

from random import Random

from tests.campaign.cases import MICRO_BATCH, SIGTERM, START_UP, Case, Settings, Stop
from tests.campaign.launch import LAST

SUPERVISED = "trainckpt run"
ITEMS = 93  # of an epoch
RANKS = (2, 4, 2, 8, 2, 4, 2, 4, 2, 8)
START_UP_SHARE = 0.12
START_UP_S = {2: 3.5, 4: 7.0, 8: 14.0}  # from a rank's process to its first micro-batch, about
MICRO_BATCH_S = 0.012  # times ranks: 2 cores share them

#              model, ranks, accumulate, workers, dropout, save every, batch
TABLE = tuple(
    Settings(model, "ddp", ranks, *rest)
    for model, ranks, *rest in (
        ("char_gpt", 2, 3, 2, 0.1, 2, 4),
        ("char_gpt", 2, 4, 0, 0.1, 3, 3),
        ("char_gpt", 2, 1, 2, 0.0, 2, 4),
        ("kitchen_sink", 2, 3, 2, 0.1, 1, 3),
        ("char_gpt", 4, 3, 2, 0.1, 2, 4),
        ("char_gpt", 4, 4, 0, 0.0, 2, 3),
        ("kitchen_sink", 4, 3, 1, 0.1, 2, 3),
        ("char_gpt", 8, 4, 1, 0.1, 2, 3),
        ("char_gpt", 8, 3, 0, 0.1, 3, 3),
    )
)


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(f"one rank {seed}")
    ranks = RANKS[seed % len(RANKS)]
    settings = random.choice([row for row in TABLE if row.ranks == ranks])
    number = random.choices([1, 2], [1, 3])[0]
    stops = [_stop(random, settings) for _ in range(number)]
    return Case(seed, settings, SUPERVISED, tuple(sorted(stops, key=lambda stop: stop.place)))


def epoch_length(settings: Settings) -> int:
    """Micro-batches of an epoch, on each rank."""
    items = -(-ITEMS // settings.ranks)
    return -(-items // settings.batch_size)


def _stop(random: Random, settings: Settings) -> Stop:
    rank, ranks = random.random(), settings.ranks
    place = random.choice(_places(random, settings))
    if random.random() < START_UP_SHARE:
        delay_s = random.uniform(0, START_UP_S[ranks])
        return Stop(SIGTERM, "one", START_UP, place, rank, delay_s, 0.0)
    delay_s = random.choice([0.0, random.uniform(0, MICRO_BATCH_S * ranks)])
    return Stop(SIGTERM, "one", MICRO_BATCH, place, rank, delay_s, 0.0)


def _places(random: Random, settings: Settings) -> list[int]:
    """Micro-batches of one sort: at an edge of a window, of an epoch, or anywhere."""
    whole = range(1, settings.micro_batches - LAST + 1)
    length = random.choice([settings.accumulate, epoch_length(settings), 1])
    edge = random.choice([0, length - 1])  # the first, the last
    return [place for place in whole if place % length == edge] or list(whole)
