"""Datasets, samplers and loops that the tests share; spawned workers import them from here."""

from __future__ import annotations

import functools
import hashlib
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from trainckpt.data.loader import TrackedLoader
from trainckpt.data.randomness import main_rng, set_main_rng

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 23


class Augmented(Dataset):
    """Draws from all three generators for every sample; may write each load to a log."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        if self.log is not None:
            with self.log.open("ab") as file:
                file.write(f"{index}\n".encode())
        drawn = torch.rand(2), torch.tensor(np.random.randn(3)), torch.tensor(random.gauss(0, 1))
        return torch.tensor(index), *drawn


class Rows(Dataset):
    """Has the attributes that it is given; a sample depends on `epoch`."""

    epoch = 0

    def __init__(self, **values) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return 1000 * self.epoch + index


class Packs:
    """A collate_fn that packs three samples and carries the rest."""

    def __init__(self) -> None:
        self.rest: list[torch.Tensor] = []

    def __call__(self, samples):
        self.rest += samples
        packed, self.rest = self.rest[:3], self.rest[3:]
        return torch.stack(packed)


class KeptPacks(Packs):
    """Says what it carries."""

    def state_dict(self):
        return {"rest": self.rest}

    def load_state_dict(self, state):
        self.rest = state["rest"]


class OwnGenerators(Dataset):
    """Draws from generators that it holds, each kind at another depth."""

    def __init__(self) -> None:
        held = np.random.RandomState(5)
        self.rng = np.random.default_rng(3)
        self.transforms = [functools.partial(draw, random.Random(4)), held]
        self.options = {"noise": torch.Generator().manual_seed(6)}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        drawn = self.rng.normal(), self.transforms[0](), self.transforms[1].rand()
        noise = torch.rand(2, generator=self.options["noise"])
        return torch.tensor(index), torch.tensor(drawn), noise


class Sendable(Dataset):
    """Holds a generator that reaches a spawned worker; torch's own do not."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        return torch.tensor([index, self.rng.normal()])


class OwnGeneratorStream(IterableDataset):
    """A stream without state that draws from a generator which it holds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        for index in range(LENGTH):
            yield torch.tensor([index, self.rng.normal()])


class LateGenerator(Sendable):
    """Makes its generator at the first sample."""

    def __init__(self) -> None:
        self.rng = None

    def __getitem__(self, index: int):
        self.rng = self.rng or np.random.default_rng(3)
        return super().__getitem__(index)


class Masking:
    """A collate_fn that draws from a generator which it holds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)

    def __call__(self, samples: list):
        batch = torch.utils.data.default_collate(samples)
        return [*batch, torch.rand(len(samples), generator=self.generator)]


class Plain(Dataset):
    """Draws nothing."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        return torch.tensor(index)


class Refusing(Plain):
    """Cannot load sample 5."""

    def __getitem__(self, index: int):
        if index == 5:
            raise LookupError("sample 5 is damaged")
        return super().__getitem__(index)


class Stuck(Plain):
    """Tells its process id through a pipe, then never returns."""

    def __init__(self, write_end: int, block_end: int) -> None:
        self.write_end, self.block_end = write_end, block_end

    def __getitem__(self, index: int):
        os.write(self.write_end, os.getpid().to_bytes(8, "little"))
        os.read(self.block_end, 1)


class Stream(IterableDataset):
    """An IterableDataset without state."""

    def __iter__(self):
        return iter(torch.arange(LENGTH))


class StatefulStream(Stream):
    """An IterableDataset that keeps its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        start, self.at = self.at, self.at
        for index in range(start, LENGTH):
            self.at = index + 1
            yield torch.tensor(index)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class GoesOn(StatefulStream):
    """Each pass has the next few samples, for ever."""

    def __iter__(self):
        ends = self.at + LENGTH - self.at % LENGTH
        while self.at < ends:
            self.at += 1
            yield torch.tensor(self.at - 1)


class BeginsAnew(StatefulStream):
    """Each pass begins at 0, but the first one after a load, which goes on from there."""

    loaded = 0

    def __iter__(self):
        self.at, self.loaded = self.loaded, 0
        while self.at < LENGTH:
            self.at += 1
            yield torch.tensor(self.at - 1)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.loaded = state["at"]


class StaysLoaded(BeginsAnew):
    """Each pass begins at what was loaded last, else at 0."""

    def __init__(self) -> None:
        self.at = self.loaded = 0

    def __iter__(self):
        self.at = self.loaded
        while self.at < LENGTH:
            self.at += 1
            yield torch.tensor(self.at - 1)


class Peeked(StaysLoaded):
    """A sample of it was looked at before training, so its state is not that of its beginning."""

    def __init__(self) -> None:
        super().__init__()
        next(iter(self))


class Wrapping(IterableDataset):
    """Hands its state on to another one, which stays where it was loaded."""

    def __init__(self) -> None:
        self.inner = StaysLoaded()

    def __iter__(self):
        return (sample + 100 for sample in self.inner)

    def state_dict(self) -> dict[str, object]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.inner.load_state_dict(state["inner"])


class StaysInEpoch(StaysLoaded):
    """Begins where it was loaded in that epoch, as datasets of Hugging Face do; else at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = self.loaded_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.at = self.loaded if self.epoch == self.loaded_epoch else 0
        order = list(range(LENGTH))
        random.Random(self.epoch).shuffle(order)
        while self.at < LENGTH:
            self.at += 1
            yield torch.tensor(order[self.at - 1])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded, self.loaded_epoch = state["at"], state["epoch"]


class OtherOrders(BeginsAnew):
    """Each pass has an order of its own, drawn from a state that each pass turns on."""

    turns = 0

    def __iter__(self):
        start, self.loaded = self.loaded, 0
        if not start:
            self.turns += 1
        order = list(range(LENGTH))
        random.Random(self.turns).shuffle(order)
        self.at = start
        for index in order[start:]:
            self.at += 1
            yield torch.tensor(index)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.turns = state["turns"]


class CountsPasses(GoesOn):
    """Goes on, and its state says in which pass it is."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        yield from super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class BeginsLate(BeginsAnew):
    """As BeginsAnew, with no position before the first pass."""

    def __init__(self) -> None:
        pass


class StaysLoadedLate(StaysLoaded):
    """As StaysLoaded, with no position before the first pass."""

    def __init__(self) -> None:
        self.loaded = 0


class StaysLoadedInside(StaysLoadedLate):
    """As StaysLoadedLate, and nobody sees what a load assigns."""

    def __init__(self) -> None:
        self.held = {"loaded": 0}

    @property
    def loaded(self) -> int:
        return self.held["loaded"]

    @loaded.setter
    def loaded(self, value: int) -> None:
        self.held["loaded"] = value


class TurnsWhenLoaded(OtherOrders):
    """Its passes' orders after a load are not those it had without one."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.turns += 100


class OnePass(GoesOn):
    """Wants a state loaded before each further pass."""

    used = False

    def __iter__(self):
        if self.used:
            raise LookupError("load a state first")
        self.used = True
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.used = False


class OwnSampler(Sampler):
    """A custom sampler: pure in its seed and epoch."""

    def __init__(self) -> None:
        self.seed, self.epoch = 3, 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self):
        order = list(range(LENGTH))
        random.Random(self.seed + self.epoch).shuffle(order)
        return iter(order)


class StatefulSampler(OwnSampler):
    """A custom sampler that turns its own state on at each pass."""

    def __init__(self) -> None:
        self.turns = 0

    def __iter__(self):
        self.turns += 1
        order = list(range(LENGTH))
        random.Random(self.turns).shuffle(order)
        return iter(order)

    def state_dict(self) -> dict[str, int]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turns = state["turns"]


class Countdown:
    """Not a DataLoader: an iterable with a state of its own."""

    def __init__(self) -> None:
        self.left = 5

    def __iter__(self):
        while self.left > 0:
            self.left -= 1
            yield self.left
        self.left = 5

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]


def draw(generator: random.Random) -> float:
    """Return a number drawn."""
    return generator.random()


def init_that_draws(worker: int) -> None:
    """A worker_init_fn that leaves its trace in all three generators."""
    random.random(), np.random.rand(), torch.rand(())


def seed_all(seed: int) -> None:
    """Seed the main process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def digest(batch: object) -> str:
    """Return a short name of a batch's bits."""
    tensors = batch if isinstance(batch, (list, tuple)) else [batch]
    return hashlib.sha1(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:10]


def comparable(value):
    """Return a copy of a state, tensors as bytes, that later changes would not reach."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


class StoppedError(Exception):
    """Raised at the boundary where a run is interrupted."""


class Run:
    """A training loop of some epochs that draws from the main generators like dropout would."""

    def __init__(self, loader, *, stop=None, limit: int | None = None) -> None:
        self.rows: list[tuple[int, str, float, float]] = []
        self.saved: dict | None = None
        self.stop, self.limit, self.boundaries = stop, limit, 0
        self.rng: dict | None = None
        self.epoch = self.number = 0
        self.plain = loader
        self.loader = TrackedLoader(
            loader, name="train", on_boundary=self.boundary, before_first_fetch=self.restore
        )

    def boundary(self) -> None:
        self.boundaries += 1
        if self.boundaries == self.stop:
            rng = main_rng() if self.rng is None else self.rng  # loaded, and not yet put back
            self.saved = {"data": self.loader.state(), "rng": rng, "epoch": self.epoch}
            raise StoppedError

    def restore(self) -> None:
        if self.rng is not None:
            set_main_rng(self.rng)
            self.rng = None

    def load(self, saved: dict) -> Run:
        self.loader.load_state(saved["data"])
        self.rng, self.epoch = saved["rng"], saved["epoch"]
        self.number = saved["data"]["batches"] if saved["data"]["in_pass"] else 0
        return self

    def train(self, loader=None, epochs: int = 3) -> list:
        loader = self.loader if loader is None else loader
        while self.epoch < epochs:
            self.set_epoch()
            for batch in loader:
                self.number += 1
                self.rows.append(
                    (self.epoch, digest(batch), float(torch.rand(())), random.random())
                )
                if self.number == self.limit:
                    break
            self.epoch, self.number = self.epoch + 1, 0
        return self.rows

    def set_epoch(self) -> None:
        batch_sampler = getattr(self.plain, "batch_sampler", None)
        samplers = (getattr(self.plain, "sampler", None), getattr(batch_sampler, "sampler", None))
        for sampler in (getattr(self.plain, "dataset", None), *samplers):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)


def straight(make, epochs: int = 3, limit: int | None = None, seed: int = 7) -> list:
    """Return the rows of the plain DataLoader, untracked."""
    seed_all(seed)
    loader = make()
    rows = Run(loader, limit=limit).train(loader, epochs)
    loader._iterator = None  # persistent workers end here, not when the collector comes by
    return rows


def stopped_again_and_again(make, stops, limit: int | None = None) -> list:
    """Return all rows of a run whose attempts stop at these boundaries, each counting its own."""
    rows, saved = [], None
    for seed, stop in enumerate([*stops, None]):
        seed_all(999 + seed if saved else 7)
        run = Run(make(), stop=stop, limit=limit)
        try:
            (run.load(saved) if saved else run).train()
        except StoppedError:
            saved = run.saved
        finally:
            run.loader.shutdown()
        rows += run.rows
    return rows


def interrupted(make, stop: int, epochs: int = 3, limit: int | None = None) -> tuple[list, list]:
    """Return the rows up to boundary `stop` and those of the run that was resumed from there."""
    seed_all(7)
    first = Run(make(), stop=stop, limit=limit)
    try:
        first.train(epochs=epochs)
        raise AssertionError(f"the run has no boundary {stop}")
    except StoppedError:
        pass
    first.loader.shutdown()
    if isinstance(first.plain.generator, torch.Generator):
        first.plain.generator.manual_seed(1)
    seed_all(999)
    second = Run(make(), limit=limit).load(first.saved)
    try:
        return first.rows, second.train(epochs=epochs)
    finally:
        second.loader.shutdown()
