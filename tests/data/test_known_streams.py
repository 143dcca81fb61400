"""Streams that count their passes in `epoch`, and states that a load would disturb."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data import datasets as d
from trainckpt.data import carried_state, randomness
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.state_dict_methods import is_of
from trainckpt.data.state_differences import restored
from trainckpt.errors import ConfigurationError


class Stage:
    """As webdataset's detshuffle: another order in each epoch, which it counts itself."""

    epoch = -1

    def __init__(self):
        self.epoch = -1

    def run(self, numbers):
        self.epoch += 1
        order = list(numbers)
        random.Random(self.epoch).shuffle(order)
        return order


class Pipeline(IterableDataset):
    def __init__(self):
        self.pipeline = [Stage(), Stage()]

    def __iter__(self):
        numbers = range(d.LENGTH)
        for stage in self.pipeline:
            numbers = stage.run(numbers)
        return map(torch.tensor, numbers)


@pytest.mark.parametrize("limit", [None, 2], ids=["run out", "left"])
def test_a_stream_goes_on_in_the_order_of_the_epoch_that_its_stages_count(limit, recwarn):
    def make():
        return DataLoader(Pipeline(), batch_size=5)

    want = d.straight(make, limit=limit)
    passes = -(-d.LENGTH // 5) if limit is None else limit
    assert len({str([row[1] for row in want if row[0] == epoch]) for epoch in range(3)}) == 3
    for stop in (2, passes, passes + 1, passes + 2, 2 * passes + 2):
        before, after = d.interrupted(make, stop, limit=limit)
        assert before + after == want, f"stopped at boundary {stop}"
    assert not [one for one in recwarn if "not kept" in str(one.message)]


@pytest.mark.parametrize("stop", [8, 14, pytest.param(13, marks=pytest.mark.long)])
def test_so_it_does_in_workers_that_count_their_own(stop):
    def make():
        return DataLoader(Pipeline(), batch_size=5, num_workers=2, persistent_workers=True)

    want = d.straight(make)
    assert len({str([row[1] for row in want if row[0] == epoch]) for epoch in range(3)}) == 3
    before, after = d.interrupted(make, stop)
    assert before + after == want


def test_the_count_of_its_epochs_is_no_part_that_is_not_kept():
    loader = TrackedLoader(DataLoader(Pipeline(), batch_size=5), name="train")
    list(loader)
    assert restored("train", loader.state(), in_place=True) == []


class ByClass(IterableDataset):
    """The first value of its count is of the class alone."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        order = list(range(d.LENGTH))
        random.Random(int(self.epoch)).shuffle(order)
        return map(torch.tensor, order)


class ByNumber(ByClass):
    def __init__(self):
        self.epoch = 0


class ByTensor(ByClass):
    def __init__(self):
        self.epoch = torch.zeros((), dtype=torch.int64)


def test_a_count_that_begins_as_a_class_default_goes_on_between_two_passes():
    def make():
        return DataLoader(ByClass(), batch_size=5)

    want, passes = d.straight(make), -(-d.LENGTH // 5)
    for stop in (passes + 1, 2 * passes + 2):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def test_a_count_that_is_no_number_is_named():
    loader = TrackedLoader(DataLoader(ByTensor(), batch_size=5), name="train")
    with pytest.warns(UserWarning, match=r"dataset\.epoch changed over a pass, and is not kept"):
        list(loader)


class DrawnSeed(IterableDataset):
    """Draws a seed as it is made, as webdataset's shardshuffle does."""

    def __init__(self):
        self.pipeline = [SimpleNamespace(kw={"seed": random.getrandbits(100)})]

    def __iter__(self):
        order = list(range(d.LENGTH))
        random.Random(self.pipeline[0].kw["seed"]).shuffle(order)
        return map(torch.tensor, order)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [3, 12, 14])
def test_a_seed_that_was_drawn_as_a_stream_was_made_is_restored(stop, workers):
    def make():
        return DataLoader(DrawnSeed(), batch_size=5, num_workers=workers)

    want = d.straight(make)
    before, after = d.interrupted(make, stop)
    assert before + after == want


class ByArray(ByNumber):
    def __iter__(self):
        for number in super().__iter__():
            self.epoch = np.int64(self.epoch)
            yield number


def test_workers_bear_a_count_that_becomes_another_type():
    loader = TrackedLoader(DataLoader(ByArray(), batch_size=5, num_workers=1), name="train")
    assert len(list(loader)) == -(-d.LENGTH // 5)


def test_the_workers_states_of_an_older_release_are_compared_as_far_as_they_go():
    def make():
        return DataLoader(ByNumber(), batch_size=5, num_workers=1)

    d.seed_all(7)
    run = d.Run(make(), stop=3)
    with pytest.raises(d.StoppedError):
        run.train()
    run.loader.shutdown()
    saved = run.saved["data"]
    for states in saved["workers"].values():
        del states["passes"]
    problems = []
    loader = TrackedLoader(make(), name="train", report=problems.append)
    loader.load_state(saved)
    next(iter(loader))
    loader.shutdown()
    assert problems == []


class Disturbed:
    """Draws otherwise once any state was loaded, as datasets of Hugging Face do in workers."""

    def __init__(self, number=0):
        self.number, self.loads = number, 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number, self.loads = state["number"], self.loads + 1


def test_a_state_that_a_dataset_of_hugging_face_has_already_is_not_loaded(monkeypatch):
    monkeypatch.setattr(Disturbed, "__module__", "datasets.iterable_dataset")
    same, other = Disturbed(1), Disturbed(2)
    saved = carried_state.capture({"dataset": Disturbed(1), "collate_fn": Disturbed(1)})
    carried_state.restore({"dataset": same, "collate_fn": other}, saved)
    assert (same.number, same.loads) == (1, 0)
    assert (other.number, other.loads) == (1, 1)


class Ordered(Disturbed):
    """Its state is a dictionary, whose order counts."""

    def load_state_dict(self, state):
        self.number = dict(state["number"])


def test_any_other_state_is_loaded_since_one_that_compares_equal_may_be_in_another_order():
    saved = carried_state.capture({"dataset": Ordered({"a": 1, "b": 2})})
    dataset = Ordered({"b": 2, "a": 1})
    carried_state.restore({"dataset": dataset}, saved)
    assert list(dataset.number) == ["a", "b"]


def test_a_generator_is_found_below_any_number_of_nodes():
    kind = type("BaseNode", (SimpleNamespace,), {"__module__": "torchdata.nodes.base_node"})
    node = kind(sampler=SimpleNamespace(generator=torch.Generator()))
    for _ in range(20):
        node = kind(source=node)
    [path] = randomness.capture({"loader": node})
    assert path == "loader" + 20 * ".source" + ".sampler.generator"


OF_DATASETS = {"__module__": "datasets.iterable_dataset"}
Buffer = type("BufferShuffledExamplesIterable", (SimpleNamespace,), OF_DATASETS)


class Inside(IterableDataset):
    """A script's dataset around one of datasets."""

    def __init__(self, stage):
        self.dataset = SimpleNamespace(_ex_iterable=SimpleNamespace(ex_iterable=stage))

    def __iter__(self):
        return iter(())


class Keeping(Inside, Disturbed):
    """Its own state holds the buffer."""

    def __init__(self, stage):
        Inside.__init__(self, stage)
        Disturbed.__init__(self)


class OwnState(d.StaysLoaded):
    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset


def test_a_buffer_that_a_loader_s_own_state_lacks_is_refused_unless_the_dataset_keeps_it():
    with pytest.raises(ConfigurationError, match=r"DataLoader in place of OwnState"):
        TrackedLoader(OwnState(Inside(Buffer())), name="train")
    TrackedLoader(OwnState(Inside(SimpleNamespace())), name="train")
    TrackedLoader(OwnState(Inside(Buffer(buffer_size=1))), name="train")
    TrackedLoader(OwnState(Keeping(Buffer())), name="train")


def test_a_script_s_own_classes_with_the_names_of_libraries_are_not_refused():
    own = type("ResampledShards", (SimpleNamespace,), {})
    loader = TrackedLoader(DataLoader(Inside(own())), name="train")
    assert list(loader) == []
    TrackedLoader(OwnState(Inside(type("BufferShuffledExamplesIterable", (), {})())), name="train")


def test_a_class_derived_from_a_package_s_is_of_that_package():
    assert is_of(type("Own", (DataLoader,), {})(range(3)), "torch")
    assert is_of(torch.utils.data.default_collate, "torch")
    assert not is_of(Pipeline.__iter__, "torch")
