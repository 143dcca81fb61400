"""Cases: which run, started how, stopped when. A pure function of the seed.

The settings come from one table rather than from the seed, so that a few dozen uninterrupted
reference runs serve thousands of cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SIGTERM, SIGKILL, BOTH = "SIGTERM", "SIGKILL", "SIGTERM then SIGKILL"
MICRO_BATCH, SAVE, START_UP, WORKERS = "micro-batch", "save", "start-up", "workers"
FORK, TORCHRUN = "fork", "torchrun"
STEPS = {1: 15, 3: 7, 4: 6}  # optimizer steps by accumulation: 15, 21 and 24 micro-batches
TORCHRUN_SHARE = 0.13


@dataclass(frozen=True)
class Settings:
    """One command line. Equal settings share one reference run."""

    model: str
    parallel: str
    ranks: int
    accumulate: int
    workers: int
    dropout: float
    save_every: int
    batch_size: int

    @property
    def steps(self) -> int:
        return STEPS[self.accumulate]

    @property
    def micro_batches(self) -> int:
        return self.steps * self.accumulate

    @property
    def words(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        sink = "" if self.model == "char_gpt" else f"{self.model}, "
        return (
            f"{sink}{self.parallel}, {ranks}, accumulation {self.accumulate}, "
            f"{self.workers} workers, dropout {self.dropout}, batch {self.batch_size}, "
            f"save every {self.save_every}"
        )

    @property
    def key(self) -> str:
        """File name of the reference."""
        return (
            f"{self.model}-{self.parallel}{self.ranks}-a{self.accumulate}-w{self.workers}"
            f"-d{self.dropout}-b{self.batch_size}-s{self.save_every}"
        )

    def argv(self, run: str, trace: str) -> list[str]:
        """The script's arguments."""
        buffers = self.model == "kitchen_sink" and self.parallel == "ddp"
        return [
            *("--size", "small", "--parallel", self.parallel, "--steps", str(self.steps)),
            *("--accumulate", str(self.accumulate), "--workers", str(self.workers)),
            *("--dropout", str(self.dropout), "--batch-size", str(self.batch_size)),
            *("--save-every", str(self.save_every), "--run", run, "--trace", trace),
            *(["--rank-local-buffers"] if buffers else []),
        ]


@dataclass(frozen=True)
class Stop:
    """One interruption.

    Attributes:
        signal: What is sent.
        target: To whom SIGTERM goes: "one" rank, "all" ranks, the "group" with its workers, or
            torchrun itself ("launcher").
        when: What is waited for before it is sent.
        place: Micro-batches trained before it (`MICRO_BATCH`), or before the save is looked for.
        fraction: Uniform in [0, 1): which rank, how long after launch; whatever needs a number.
        delay_s: From the moment waited for to the signal.
        mercy_s: From SIGTERM to SIGKILL, for `BOTH`.
    """

    signal: str
    target: str
    when: str
    place: int
    fraction: float
    delay_s: float
    mercy_s: float


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    settings: Settings
    launcher: str
    stops: tuple[Stop, ...]

    @property
    def words(self) -> str:
        stops = ", ".join(f"{stop.signal} at {stop.when}" for stop in self.stops)
        return f"{self.settings.words}; {self.launcher}; {stops}"


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(seed)
    settings = random.choices(TABLE, [_weight(row) for row in TABLE])[0]
    launcher = TORCHRUN if random.random() < TORCHRUN_SHARE else FORK
    if settings.parallel == "none":
        launcher = FORK  # plain python: there is nothing for torchrun to do
    number = random.choices([1, 2, 3], [5, 4, 2])[0]
    stops = [_stop(random, settings, launcher) for _ in range(number)]
    return Case(seed, settings, launcher, tuple(sorted(stops, key=lambda stop: stop.place)))


def _table() -> tuple[Settings, ...]:
    random = Random("campaign settings, second draw")
    shapes = [("none", 1), ("ddp", 1), ("ddp", 2), ("ddp", 3)]
    rows = []
    for accumulate in (1, 3, 4):
        for workers in (0, 2):
            for number, (parallel, ranks) in enumerate(shapes):
                model = "kitchen_sink" if (number + accumulate + workers) % 4 == 0 else "char_gpt"
                for _ in range(1 if accumulate == 1 else 2):
                    chances = (
                        random.choice([0.0, 0.1]),
                        random.choice([1, 2, 3]),
                        random.choice([3, 4]),
                    )
                    rows.append(Settings(model, parallel, ranks, accumulate, workers, *chances))
                    model = "char_gpt"
    return tuple(dict.fromkeys(rows))


def _weight(row: Settings) -> float:
    many = {1: 1.0, 2: 1.5, 3: 2.0}[row.ranks]  # 3 ranks show what 2 hide
    return many * (0.5 if row.accumulate == 1 else 1.0) * (1.3 if row.workers else 1.0)


def _stop(random: Random, settings: Settings, launcher: str) -> Stop:
    signal = random.choices([SIGTERM, SIGKILL, BOTH], [5, 4, 1])[0]
    targets = ["one", "launcher"] if launcher == TORCHRUN else ["one", "all", "group"]
    target = random.choice(targets)
    kinds = [MICRO_BATCH, SAVE, START_UP, WORKERS]
    when = random.choices(kinds, [9, 1, 1, 0.8 if settings.workers else 0])[0]
    place, aimed = random.randrange(1, settings.micro_batches - 3), random.random() < 0.8
    if aimed and when == MICRO_BATCH:
        place = _into_window(place, settings.accumulate)
    at_once = when == SAVE or random.random() < (0.7 if aimed else 0.2)
    delay_s = 0.0 if at_once else random.uniform(0, 0.025)
    return Stop(signal, target, when, place, random.random(), delay_s, random.uniform(0, 0.06))


def _into_window(place: int, accumulate: int) -> int:
    """A place near `place` from which the stop falls inside a window, if nothing is late.

    SIGKILL strikes in the micro-batch after it; SIGTERM is acted on at that one's begin or end.
    """
    if accumulate == 1:
        return place
    return place - place % accumulate + 1 + place % (accumulate - 2)


TABLE = _table()
