"""Numbers in a map-style dataset: those that the training loop sets, and those of workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from tests.data.datasets import Rows
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.restored_numbers import LoopNumbers, numbers, replaced


class Levels(Dataset):
    """Samples that depend on a level, which the loop sets, and a count of those read."""

    level, reads = 1, 0

    def __init__(self, *, is_counted=False):
        self.is_counted = is_counted
        self.name = "easy"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.is_counted:
            self.reads += 1
        return 100 * self.level + index


class Stateful(Levels):
    """Keeps its level by itself."""

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


def trained_with(loader, set_numbers, *, stop=None, saved=None):
    """Call `set_numbers` after each batch of two passes.

    Returns:
        The batches, and the loader's state after batch `stop`, or at the end.
    """
    loader = TrackedLoader(loader, name="loader")
    if saved is not None:
        loader.load_state(saved)
    got = []
    for _ in range(loader.passes_started - loader.in_pass, 2):
        for batch in loader:
            got.append(batch.tolist())
            set_numbers()
            if len(got) == stop:
                state = loader.state()
                loader.shutdown()
                return got, state
    loader.shutdown()
    return got, loader.state()


def trained(dataset, *, wrap=lambda dataset: dataset, workers=0, **how):
    """Raise the level after each batch."""

    def raise_level():
        dataset.level += 1

    loader = DataLoader(wrap(dataset), 2, num_workers=workers)
    return trained_with(loader, raise_level, **how)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(8))], ids=["", "subset"])
@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_number_set_after_each_batch_goes_on_from_where_it_was(stop, wrap):
    whole, _ = trained(Levels(), wrap=wrap)
    first, saved = trained(Levels(), wrap=wrap, stop=stop)
    rest, _ = trained(Levels(), wrap=wrap, saved=saved)
    assert first + rest == whole


def test_workers_that_start_for_the_next_pass_see_the_number():
    whole, _ = trained(Levels(), workers=1)
    first, saved = trained(Levels(), workers=1, stop=3)
    rest, _ = trained(Levels(), workers=1, saved=saved)
    assert first + rest == whole
    assert whole[4:] == [[500, 501], [502, 503], [504, 505], [506, 507]]


def test_a_number_that_reading_sets_too_is_not_restored():
    dataset = Levels(is_counted=True)
    numbers = LoopNumbers({"dataset": dataset})
    for _ in range(2):
        numbers.before_batch()
        dataset[0]
        numbers.after_batch()
        dataset.reads, dataset.level = 0, dataset.level + 1
    assert numbers.values() == {"dataset.level": 3}


def test_a_number_set_before_the_first_batch_is_the_script_s():
    dataset = Levels()
    numbers = LoopNumbers({"dataset": dataset})
    dataset.level, dataset.name = 7, "hard"
    numbers.before_batch()
    numbers.after_batch()
    assert numbers.values() == {}
    dataset.name = "harder"
    assert numbers.values() == {"dataset.name": "harder"}


def test_a_number_restored_is_saved_again():
    dataset = Levels()
    numbers = LoopNumbers({"dataset": dataset})
    numbers.restore({"dataset.level": 5, "dataset.inner.gone": 1})
    assert dataset.level == 5
    numbers.before_batch()
    assert numbers.values() == {"dataset.level": 5}


def test_a_dataset_with_a_state_of_its_own_is_left_to_it():
    dataset = Stateful()
    numbers = LoopNumbers({"dataset": dataset})
    numbers.before_batch()
    dataset.level = 4
    assert numbers.values() == {}


class Scale:
    """A transform or collator whose factor the loop sets."""

    def __init__(self):
        self.factor = 1

    def __call__(self, samples):
        return torch.tensor(samples) * self.factor


class Transformed(Dataset):
    def __init__(self, transform):
        self.transforms = [transform]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transforms[0](index)


def scaled(in_collate, *, workers=0, **how):
    """Raise the factor of a collator, or of a transform, after each batch."""
    scale = Scale()

    def raise_factor():
        scale.factor += 1

    if in_collate:
        loader = DataLoader(range(8), 2, collate_fn=scale, num_workers=workers)
    else:
        loader = DataLoader(Transformed(scale), 2, num_workers=workers)
    return trained_with(loader, raise_factor, **how)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("in_collate", [True, False], ids=["collate_fn", "transform"])
def test_a_number_of_a_collator_or_a_transform_goes_on(in_collate, workers):
    whole, _ = scaled(in_collate, workers=workers)
    for stop in (1, 3, 6):
        first, saved = scaled(in_collate, workers=workers, stop=stop)
        rest, _ = scaled(in_collate, workers=workers, saved=saved)
        assert first + rest == whole


def test_the_numbers_of_modules_with_parameters_and_modes_are_left_out():
    class Holder(Dataset):
        def __init__(self):
            self.model, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)

    dataset = Holder()
    numbers = LoopNumbers({"dataset": dataset})
    numbers.before_batch()
    dataset.model.in_features = 3
    dataset.drop.p = 0.5
    dataset.drop.eval()
    assert numbers.values() == {"dataset.drop.p": 0.5}


def test_numbers_are_replaced_for_a_while_and_put_back():
    rows = Rows(size=3, name="a")
    assert numbers({"dataset": rows}) == {
        "dataset.epoch": 0,
        "dataset.size": 3,
        "dataset.name": "a",
    }
    with replaced({"dataset": rows}, {"dataset.epoch": 7, "dataset.size": 9}):
        assert (rows.epoch, rows.size, rows.name) == (7, 9, "a")
    assert (rows.epoch, rows.size, rows.name) == (0, 3, "a")
    assert "epoch" not in vars(rows)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_of_a_resume_start_with_the_numbers_of_those_before(persistent):
    def begun():
        rows = Rows()
        options = {"num_workers": 1, "persistent_workers": persistent}
        return rows, TrackedLoader(DataLoader(rows, 2, **options), name="loader")

    rows, loader = begun()
    first = iter(loader)
    next(first)
    rows.epoch = 1  # its workers do not see it
    saved = loader.state()
    rest = [batch.tolist() for batch in first]
    later = [batch.tolist() for batch in loader]
    loader.shutdown()
    rows, resumed = begun()
    rows.epoch = 1
    resumed.load_state(saved)
    assert [batch.tolist() for batch in resumed] == rest == [[2, 3], [4, 5], [6, 7]]
    assert [batch.tolist() for batch in resumed] == later
    assert (later[0][0] == 0) == persistent
    assert rows.epoch == 1
    resumed.shutdown()
