"""Generators that a dataset or a collate_fn holds go on as all others do."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from tests.data import datasets as d
from trainckpt.data import randomness
from trainckpt.data.loader import TrackedLoader

KINDS = {"no workers": (0, False), "2": (2, False), "3 kept": (3, True)}


def loader_of(dataset, workers=0, persistent=False, start="fork", **options):
    """Return a function that makes the same DataLoader again and again."""

    def make() -> DataLoader:
        return DataLoader(
            dataset(),
            batch_size=4,
            num_workers=workers,
            persistent_workers=persistent,
            multiprocessing_context=start if workers else None,
            **{name: option() for name, option in options.items()},
        )

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_with_generators_of_its_own_goes_on_bitwise_from_any_boundary(kind):
    """In an epoch, at its end, between epochs; in the main process and in workers."""
    make = loader_of(d.OwnGenerators, *KINDS[kind], collate_fn=d.Masking)
    want = d.straight(make)
    for stop in range(1, 18, 1 if kind == "no workers" else 5):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"
    assert d.stopped_again_and_again(make, (3, 5, 6)) == want


def test_generators_in_spawned_workers_go_on_bitwise():
    make = loader_of(d.Sendable, 1, start="spawn")
    want = d.straight(make, epochs=1)
    before, after = d.interrupted(make, 2, epochs=1)
    assert before + after == want


@pytest.mark.parametrize("workers", [0, 2])
def test_a_replayed_stream_begins_its_pass_with_the_generator_it_had_then(workers):
    make = loader_of(d.OwnGeneratorStream, workers)
    want = d.straight(make)
    for stop in (3, 9):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def test_the_generator_of_a_collate_fn_goes_on_beside_a_stream_with_a_state_of_its_own():
    """The stream's state_dict knows nothing of it."""
    make = loader_of(d.StatefulStream, collate_fn=d.Masking)
    want = d.straight(make)
    for stop in (2, 5):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_from_the_data_on_the_way_to_a_pass_is_undone(workers):
    """A script that looks at a sample for its shape draws from what the data holds."""
    make = loader_of(d.OwnGenerators, workers)
    first = TrackedLoader(make(), name="train")
    list(first)
    state = first.state()  # between two passes
    want = [str(batch) for batch in first]
    loader = make()
    second = TrackedLoader(loader, name="train", before_first_fetch=lambda: True)
    second.load_state(state)
    loader.dataset[0]
    assert [str(batch) for batch in second] == want


def test_a_generator_that_is_made_at_the_first_sample_is_named_with_what_to_change():
    make = loader_of(d.LateGenerator)
    with pytest.warns(UserWarning, match=r"train: dataset\.rng cannot be .* make it in __init__"):
        d.interrupted(make, 3)


def test_a_state_saved_before_such_generators_were_kept_still_loads():
    first = TrackedLoader(loader_of(d.Plain)(), name="train")
    batches = iter(first)
    next(batches)
    state = {key: value for key, value in first.state().items() if not key.startswith("data ")}
    second = TrackedLoader(loader_of(d.Plain)(), name="train")
    second.load_state(state)
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in batches]


def numpy_generator(bits: str):
    return np.random.Generator(getattr(np.random, bits)(1))


OF_KIND = {
    **{bits: lambda bits=bits: numpy_generator(bits) for bits in ("PCG64", "MT19937", "Philox")},
    "SFC64": lambda: numpy_generator("SFC64"),
    "RandomState": lambda: np.random.RandomState(1),
    "random.Random": lambda: random.Random(1),
    "torch.Generator": lambda: torch.Generator().manual_seed(1),
}


def drawn(generator) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    draw = getattr(generator, "normal", None) or generator.gauss
    return [draw(0, 1) for _ in range(3)]


@pytest.mark.parametrize("kind", OF_KIND)
def test_each_kind_of_generator_comes_back_in_the_middle_of_what_it_draws(kind):
    """Three draws of a normal leave half a pair behind, where pairs are drawn."""
    roots = {"dataset": SimpleNamespace(rng=OF_KIND[kind]())}
    drawn(roots["dataset"].rng)
    saved = randomness.unpack(randomness.pack(randomness.capture(roots)))
    want = drawn(roots["dataset"].rng)
    other = {"dataset": SimpleNamespace(rng=OF_KIND[kind]())}
    randomness.restore(other, saved, "loader")
    assert drawn(other["dataset"].rng) == want


class Slotted:
    """Holds its generator in a slot."""

    __slots__ = ("rng", "unset")

    def __init__(self) -> None:
        self.rng = random.Random(2)

    def collate(self, samples):
        return samples


def closing_over(generator):
    return lambda samples: (generator, samples)


def with_an_attribute(generator):
    def collate(samples):
        return samples

    collate.rng = generator
    return collate


class Samples(list):
    """A list with a generator beside its items."""

    def __init__(self, items) -> None:
        super().__init__(items)
        self.rng = random.Random(2)

    def __iter__(self):
        raise AssertionError("code of the script's was run")

    __len__ = __getitem__ = __iter__


class Unwilling:
    """Nobody may ask for its class: as a proxy whose object is gone, or would have to be loaded."""

    @property
    def __class__(self):
        raise ReferenceError("it is gone")


HELD = {
    "in one of many parts": lambda: ConcatDataset([d.OwnGenerators() for _ in range(100)]),
    "by a list that is more than that": lambda: Samples([1, 2]),
    "beside what may not be looked at": lambda: [Unwilling(), random.Random(2)],
    "in a slot": lambda: Slotted(),
    "by a method's object": lambda: Slotted().collate,
    "by a closure": lambda: closing_over(random.Random(2)),
    "by a function's attribute": lambda: with_an_attribute(random.Random(2)),
    "by a partial's argument": lambda: functools.partial(d.draw, random.Random(2)),
    "by what a Subset is of": lambda: Subset(d.OwnGenerators(), [0, 1]),
}


@pytest.mark.parametrize("how", HELD)
def test_a_generator_is_found_wherever_it_is_held(how):
    assert randomness.capture({"root": HELD[how]()})


def test_what_is_kept_elsewhere_or_cannot_be_told_is_left_out():
    """The global generators are the run's; the system's randomness has no state."""
    held = SimpleNamespace(
        a=random._inst, b=torch.default_generator, c=np.random.mtrand._rand, d=random.SystemRandom()
    )
    held.itself = held
    assert randomness.capture({"dataset": held}) == {}


def test_a_generator_of_another_kind_stays_as_it_is_and_is_named():
    saved = randomness.capture({"dataset": SimpleNamespace(rng=np.random.default_rng(1))})
    other = random.Random(3)
    lost = randomness.restore({"dataset": SimpleNamespace(rng=other)}, saved, "loader")
    assert lost.startswith("loader: dataset.rng cannot be put back")
    assert other.random() == random.Random(3).random()
