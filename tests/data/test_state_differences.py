"""What does not fit and what cannot be exact is said in sentences that name the loader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data import datasets as d
from trainckpt.data import iterators
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError


def tracked(dataset=None, **options) -> TrackedLoader:
    return TrackedLoader(DataLoader(dataset or d.Plain(), **options), name="train")


def test_a_torch_loader_has_no_problems():
    """Nothing is said where nothing is amiss."""
    assert tracked(shuffle=True, num_workers=2).problems() == []


def test_each_problem_is_a_sentence():
    """Order of arrival, replaced NumPy generator."""
    assert "in_order=False" in tracked(num_workers=2, in_order=False).problems()[0].reason


def test_a_replaced_numpy_generator_is_named():
    """It is the one global generator we cannot put back."""
    import numpy as np

    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert "was replaced by PCG64" in tracked().problems()[0].reason
        with pytest.raises(ConfigurationError, match="replaced by PCG64"):
            next(iter(tracked()))
    finally:
        np.random.set_bit_generator(own)


def test_differences_are_all_listed():
    """Each says what was and what is."""
    state = tracked(batch_size=4, num_workers=2, persistent_workers=True).state()
    other = tracked(range(9), batch_size=3, drop_last=True, generator=torch.Generator())
    assert other.differences(state) == [
        "train: num_workers was 2, is 0",
        "train: persistent_workers was True, is False",
        "train: batch_size was 4, is 3",
        "train: drop_last was False, is True",
        "train: dataset length was 23, is 9",
        "train: sampler length was 6, is 3",
        "train: generators and seeds was [], is ['loader']",
    ]
    assert tracked(batch_size=4, num_workers=2, persistent_workers=True).differences(state) == []
    assert TrackedLoader(d.Countdown(), name="val").differences(state) == [
        "val: the loader was of kind map, is stateful"
    ]


def test_what_cannot_be_tracked_is_refused_with_a_hint():
    """A list of batches has no position that could be kept; an own __iter__ would be bypassed."""
    with pytest.raises(ConfigurationError, match=r"ckpt\.boundary\(\)"):
        TrackedLoader([1, 2, 3], name="train")

    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    with pytest.raises(ConfigurationError, match="has its own __iter__"):
        TrackedLoader(Own(d.Plain()), name="train")


def test_a_changed_torch_is_named(monkeypatch):
    """The self-test says which private attribute is gone."""
    iterators.self_test()
    gone = (*iterators._RELIED_ON, (DataLoader.__len__, ("_new_name",)))
    monkeypatch.setattr(iterators, "_RELIED_ON", gone)
    with pytest.raises(ConfigurationError, match=r"DataLoader\.__len__ no longer uses _new_name"):
        tracked()


@pytest.mark.parametrize(
    "order", [[[0, 2], [1]], ((0, 2), (1,)), range(2)], ids=["list", "tuple", "range"]
)
def test_a_list_is_not_said_to_be_assumed(order):
    option = {"sampler": order} if isinstance(order, range) else {"batch_sampler": order}
    assert tracked(**option).problems() == []


class NeedsArguments(d.Stream):
    """As the streams of litdata and mosaicml: only their own loaders know what was yielded."""

    def state_dict(self, num_samples, *, from_beginning):
        return {}

    def load_state_dict(self, state):
        pass


class LoadsWithArguments(d.StatefulSampler):
    def load_state_dict(self, state, epoch):
        pass


class Loader(DataLoader):
    def state_dict(self, number):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: DataLoader(NeedsArguments()),
            "train: NeedsArguments.state_dict cannot be called without num_samples and from_begin",
        ),
        (
            lambda: DataLoader(d.Plain(), sampler=LoadsWithArguments()),
            "train: LoadsWithArguments.load_state_dict cannot be called without epoch, so every",
        ),
        (lambda: Loader(d.Plain()), "train: Loader.state_dict cannot be called without number"),
    ],
    ids=["stream", "sampler", "loader"],
)
def test_a_state_that_needs_arguments_is_refused_before_training(make, said):
    with pytest.raises(ConfigurationError, match=said) as refused:
        TrackedLoader(make(), name="train")
    assert "use the loader that" in str(refused.value)


def test_a_stream_in_workers_is_not_asked_for_its_state():
    TrackedLoader(DataLoader(NeedsArguments(), num_workers=2), name="train")
