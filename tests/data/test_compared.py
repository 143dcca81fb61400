"""What a resume goes through again is compared with what was trained on; nothing is assumed."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.state_differences import restored
from trainckpt.format.exactness import How, decide


class AugmentedStream(IterableDataset):
    """Draws for each sample, and has no state of its own."""

    def __iter__(self):
        for index in range(d.LENGTH):
            drawn = torch.rand(2), torch.tensor(np.random.randn()), torch.tensor(random.random())
            yield torch.tensor(index), *drawn


class Turns(IterableDataset):
    """Has another order in each pass, which nobody can know."""

    turns = 0

    def __iter__(self):
        self.turns += 1
        order = list(range(d.LENGTH))
        random.Random(self.turns).shuffle(order)
        return map(torch.tensor, order)


class Buffered(d.StaysLoaded):
    """Shuffles in a buffer, which its state does not hold, and stays where it was loaded."""

    size = 5

    def __iter__(self):
        rng, buffer = random.Random(self.seed()), []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > self.size:
                yield buffer.pop(rng.randrange(len(buffer)))
        rng.shuffle(buffer)
        yield from buffer

    def seed(self) -> int:
        return 3


class BufferedAnew(Buffered):
    """As Buffered, with another order in each pass, which its state tells."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def seed(self) -> int:
        return self.turns

    def __iter__(self):
        if not self.loaded:
            self.turns += 1
        return super().__iter__()

    def state_dict(self):
        return {"at": self.at, "turns": self.turns}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.turns = state["turns"]


class OwnGenerator(Sampler):
    """Shuffles with a generator that it holds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return d.LENGTH

    def __iter__(self):
        return iter(self.rng.permutation(d.LENGTH).tolist())


class Turning(d.OwnSampler):
    """Turns on at each pass, and does not say so."""

    turns = 0

    def __iter__(self):
        self.turns += 1
        order = list(range(d.LENGTH))
        random.Random(self.turns).shuffle(order)
        return iter(order)


REPLAYED = {
    "no workers": lambda: DataLoader(d.Stream(), batch_size=4),
    "workers": lambda: DataLoader(AugmentedStream(), batch_size=4, num_workers=2),
    "state in workers": lambda: DataLoader(d.BeginsAnew(), batch_size=4, num_workers=2),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_stream_that_is_loaded_again_is_exact_and_nothing_is_said(name):
    want = d.straight(REPLAYED[name])
    assert want != d.straight(REPLAYED[name], seed=8)
    for stop in (3, 12) if "workers" in name else range(1, len(want) + 3):
        before, after = d.interrupted(REPLAYED[name], stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Turns(), batch_size=4),
        lambda: DataLoader(AugmentedStream(), batch_size=4),
        lambda: DataLoader(Turns(), batch_size=4, num_workers=1, persistent_workers=True),
    ],
    ids=["other order", "draws between what the loop draws", "kept workers"],
)
def test_one_that_brings_other_batches_the_second_time_is_warned_of(make):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"train: dataset\.turns.* changed over a pass")
        with pytest.warns(UserWarning, match="train: the 2 batches that were loaded again to get"):
            d.interrupted(make, 10)


@pytest.mark.parametrize("kind", [Buffered, BufferedAnew])
def test_a_stream_whose_buffer_is_lost_is_loaded_again(kind):
    def make() -> DataLoader:
        return DataLoader(kind(), batch_size=4)

    want = d.straight(make)
    for stop in (2, 3, 6, 7, 8, 9, 10, 13, 14, 15, 16, 18):
        # the first four batches are loaded again anyway; after the last one nothing is needed
        if 4 < (stop - 1) % 7 < 6:
            with pytest.warns(UserWarning, match=f"train: the state of {kind.__name__} does not"):
                before, after = d.interrupted(make, stop)
        else:
            before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def test_a_sampler_goes_on_with_a_generator_that_it_holds():
    def make() -> DataLoader:
        return DataLoader(d.Augmented(), 4, sampler=OwnGenerator())

    want = d.straight(make)
    for stop in range(1, len(want) + 3):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_begins_with_another_order_than_was_trained_is_named(workers):
    def make() -> DataLoader:
        return DataLoader(d.Augmented(), 4, sampler=Turning(), num_workers=workers)

    changed = pytest.warns(
        UserWarning, match=r"train: sampler\.turns changed over a pass, and is no"
    )
    with (
        changed,
        pytest.warns(UserWarning, match="train: the order that Turning begins with is not"),
    ):
        d.interrupted(make, 10)


class DrawsEachList(Sampler):
    """A batch sampler that draws a list of indices when it is asked for one."""

    def __init__(self, draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return d.LENGTH // 4

    def __iter__(self):
        for _ in range(len(self)):
            yield self.draw(range(d.LENGTH), 4)


@pytest.mark.filterwarnings("ignore:train. . batches are loaded again, since reading a sample")
def test_samples_that_draw_from_the_generator_of_a_lazy_sampler_are_loaded_again():
    def draw(population, size):
        return np.random.choice(population, size, replace=False).tolist()

    def make() -> DataLoader:
        return DataLoader(d.Augmented(), batch_sampler=DrawsEachList(draw))

    want = d.straight(make)
    for stop in range(1, len(want) + 3):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def test_a_loop_that_draws_from_the_generator_of_a_lazy_sampler_is_warned_of():
    def make() -> DataLoader:  # the loop of these tests draws from `random` for each batch
        return DataLoader(d.Augmented(), batch_sampler=DrawsEachList(random.sample))

    with pytest.warns(UserWarning, match="train: the order that DrawsEachList begins with is not"):
        d.interrupted(make, 3)


class Caching(Dataset):
    """Keeps each sample that it has made."""

    def __init__(self, draws):
        self.draws, self.cache = draws, {}

    def __len__(self):
        return d.LENGTH

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.rand(2) if self.draws else torch.full((2,), float(index))
        return self.cache[index]


@pytest.mark.parametrize("stop", [3, 8])
def test_samples_cached_before_a_stop_that_are_drawn_otherwise_later_are_named(stop):
    with pytest.warns(UserWarning, match=r"train: dataset\.cache keeps other samples") as found:
        d.interrupted(lambda: DataLoader(Caching(draws=True), 4, shuffle=True), stop)
    assert len(found) == 1


@pytest.mark.parametrize("stop", [3, 8])
def test_samples_cached_before_a_stop_that_are_made_alike_later_are_not_named(stop):
    def make() -> DataLoader:
        return DataLoader(Caching(draws=False), 4, shuffle=True)

    before, after = d.interrupted(make, stop)
    assert before + after == d.straight(make)


class Late(Sampler):
    """Draws each batch as it is asked for, from a global generator or from one of its own."""

    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return 9

    def __iter__(self):
        for _ in range(len(self)):
            yield self.rng.choices(range(d.LENGTH), k=4)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_batches_drawn_ahead_for_workers_that_are_drawn_otherwise_are_named(stop):
    """The loop draws from the same generator, between the lists that the sampler draws."""

    def make() -> DataLoader:
        return DataLoader(d.Plain(), batch_sampler=Late(random), num_workers=2)

    with pytest.warns(UserWarning, match="train: Late had drawn the next 4 batches ahead"):
        d.interrupted(make, stop)


@pytest.mark.parametrize("stop", [1, 4, 7, 9, 12])
def test_batches_drawn_ahead_from_a_generator_of_the_samplers_own_are_the_same(stop):
    def make() -> DataLoader:
        sampler = Late(random.Random(5))
        return DataLoader(d.Plain(), batch_sampler=sampler, num_workers=2)

    before, after = d.interrupted(make, stop)
    assert before + after == d.straight(make)


@pytest.mark.parametrize(
    ("loader", "path"),
    [
        (DataLoader(d.Plain(), 4, sampler=Turning()), "sampler.turns"),
        (DataLoader(Turns(), 4), "dataset.turns"),
    ],
)
def test_what_a_sampler_or_stream_changes_over_a_pass_is_in_the_state(loader, path):
    loader = TrackedLoader(loader, name="train")
    with pytest.warns(UserWarning, match=f"train: {path} changed over a pass, and is not kept"):
        list(loader)
    (part,) = restored("train", loader.state(), in_place=True)
    assert part.how is How.NOT_KEPT
    assert part.reason.startswith(f"train: {path} changed as it was read, and was not kept; if a")


class Seeded(IterDataPipe):
    """A datapipe of the script with a seed of its own, which DataLoader sets in each pass."""

    def __init__(self, source, counts):
        self.source, self.counts, self.turns, self.drawn = source, counts, 0, None

    def set_seed(self, seed):
        self.drawn = seed

    def __iter__(self):
        self.turns += self.counts
        yield from random.Random(self.drawn).sample(list(self.source), 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_seeds_and_counters_that_torch_sets_on_datapipes_are_not_named(workers):
    pipe = Seeded(IterableWrapper(range(8)).shuffle(), counts=False)
    loader = TrackedLoader(DataLoader(pipe, 4, num_workers=workers), name="train")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert len([*loader, *loader, *loader]) == 3 * (2 if workers == 0 else 4)


def test_a_counter_of_the_script_on_a_datapipe_is_named():
    pipe = Seeded(IterableWrapper(range(8)).shuffle(), counts=True)
    loader = TrackedLoader(DataLoader(pipe, 4), name="train")
    with pytest.warns(UserWarning, match=r"train: dataset\._datapipe\.turns changed over a pass"):
        list(loader)


def told(loader) -> str:
    """What a resume in the middle of the second pass is as exact as."""
    tracked = TrackedLoader(loader, name="train")
    list(tracked)
    batches = iter(tracked)
    next(batches), next(batches)
    assert tracked.problems() == []
    return decide(restored("train", tracked.state(), in_place=True)).word


def test_what_is_not_looked_at_before_a_resume_is_said_of_it():
    assert told(DataLoader(d.Plain(), 4, shuffle=True)) == "bitwise"
    assert told(DataLoader(d.Plain(), 4, sampler=d.OwnSampler())) == "bitwise"
    assert told(DataLoader(d.Plain(), batch_sampler=[[1, 2], [3], [0]])) == "bitwise"
    assert told(DataLoader(d.BeginsAnew(), 4)) == "bitwise"
    assert told(DataLoader(d.Stream(), 4)) == "replayed and compared (train)"
    assert told(d.Countdown()) == "as exact as Countdown's own state (train)"


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(12.0),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.zeros(0),
        torch.tensor(1, dtype=torch.bfloat16),
        np.arange(5),
        {"a": [torch.ones(2), "text"], "b": (1, 2.5, None, b"x")},
    ],
    ids=["flat", "transposed", "empty", "scalar", "array", "nested"],
)
def test_a_fingerprint_tells_a_batch_from_another_and_from_itself_at_another_place(batch):
    first = fingerprint(batch)
    assert first == fingerprint(batch)
    assert len({first, fingerprint(batch, first), fingerprint([batch]), fingerprint("text")}) == 4
