"""What a dataset or a collate_fn carries from batch to batch: kept where it can be, or named."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data import datasets as d
from tests.data.datasets import KeptPacks, Packs
from trainckpt.data.carried_state import Watch
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.state_differences import restored
from trainckpt.format.exactness import How


class Counts(d.Plain):
    """A dataset that adds to each sample how many came before."""

    def __init__(self) -> None:
        self.number = 0

    def __getitem__(self, index: int):
        self.number += 1
        return torch.tensor([index, self.number])


class KeptCounts(Counts):
    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Opens(d.Plain):
    """Opens its file at the first sample, counts nothing, and keeps what it has loaded."""

    def __init__(self) -> None:
        self.file, self.opened, self.length, self.cache = None, False, 0, {}

    def __getitem__(self, index: int):
        self.file, self.opened, self.length = self.file or object(), True, d.LENGTH
        return self.cache.setdefault(index, torch.tensor(index))


class InClosure:
    """As Packs; the rest lies in a closure."""

    def __new__(cls):
        rest = deque()

        def collate(samples):
            rest.extend(samples)
            return torch.stack([rest.popleft() for _ in range(3)])

        return collate


MAKES = {
    "collate": lambda **options: DataLoader(d.Plain(), 4, collate_fn=KeptPacks(), **options),
    "dataset": lambda **options: DataLoader(KeptCounts(), 4, shuffle=True, **options),
    "stream": lambda **options: DataLoader(d.GoesOn(), 4, collate_fn=KeptPacks(), **options),
}


@pytest.mark.parametrize("name", MAKES)
def test_what_says_its_state_goes_on_with_it(name):
    want = d.straight(MAKES[name])
    for stop in range(1, len(want) + 3):
        before, after = d.interrupted(MAKES[name], stop)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("name", ["collate", "dataset"])
def test_each_worker_goes_on_with_its_own(name, kept):
    def make() -> DataLoader:
        return MAKES[name](num_workers=2, persistent_workers=kept, pin_memory=False)

    want = d.straight(make)
    for stop in (3, 8, 9):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def forked(workers, **options):
    """A loader whose dataset and collate_fn need not be pickled."""
    context = "fork" if workers else None
    return DataLoader(batch_size=4, num_workers=workers, multiprocessing_context=context, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: {"dataset": d.Plain(), "collate_fn": Packs()}, "collate_fn.rest"),
        (lambda: {"dataset": d.Plain(), "collate_fn": InClosure()}, "collate_fn.rest"),
        (lambda: {"dataset": Counts()}, "dataset.number"),
    ],
    ids=["rest", "closure", "number"],
)
def test_what_does_not_is_named_as_it_trains_and_in_the_state(make, path, workers):
    loader = TrackedLoader(forked(workers, **make()), name="train")
    with pytest.warns(UserWarning, match=f"train: {path} changes from batch to batch, and is not"):
        for _, _ in zip(range(4), loader, strict=False):
            pass
    (part,) = restored("train", loader.state(), in_place=True)
    assert part.how is How.NOT_KEPT
    assert part.reason.startswith(f"train: {path} changed as it was read, and was not kept; if a")
    loader.shutdown()


class Trainer:
    """Leads to all of the training, as Lightning's does."""

    __module__ = "lightning.pytorch.trainer.trainer"

    def __init__(self) -> None:
        self.step = 0
        self.loader = None


class DataModule(torch.nn.Module):
    """Its method is the collate_fn, and training changes all else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer, self.layer = Trainer(), torch.nn.BatchNorm1d(2)
        self.own = torch.Generator()
        self.calls = 0

    def collate(self, samples):
        torch.rand((), generator=self.own)
        return torch.stack(samples)


class CountingModule(DataModule):
    def collate(self, samples):
        self.calls += 1
        return super().collate(samples)


def trained(kind):
    """The state of a loader after four micro-batches of a model with its collate_fn."""
    module = kind()
    loader = DataLoader(d.Plain(), batch_size=2, collate_fn=module.collate)
    tracked = module.trainer.loader = TrackedLoader(loader, name="train")
    for _, _ in zip(range(4), tracked, strict=False):
        module.trainer.step += 1
        module.layer(torch.randn(3, 2))
        torch.nn.init.normal_(module.layer.weight)
    return tracked.state()


def test_a_collate_fn_of_a_data_module_is_not_followed_into_its_trainer_and_weights():
    state = trained(DataModule)
    assert state["changing"] == []
    assert list(state["data now"]) == ["collate_fn.own"]
    with pytest.warns(UserWarning, match="train: collate_fn.calls changes from batch to batch"):
        assert trained(CountingModule)["changing"] == ["collate_fn.calls"]


def test_it_is_named_once_over_all_passes():
    loader = TrackedLoader(DataLoader(Counts(), batch_size=4), name="train")
    with pytest.warns(UserWarning, match="dataset.number") as said:
        list(loader), list(loader)
    assert len(said) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "dataset", [Opens, d.Augmented, d.OwnGenerators, KeptCounts, d.Stream], ids=lambda k: k.__name__
)
def test_files_that_are_opened_caches_and_generators_are_not_named(dataset, workers):
    loader = TrackedLoader(forked(workers, dataset=dataset()), name="train")
    assert list(loader)
    assert not any(p.how is How.NOT_KEPT for p in restored("train", loader.state(), in_place=True))


def test_after_the_first_batch_alone_it_is_in_the_state_and_not_warned_of():
    loader = TrackedLoader(DataLoader(Counts(), batch_size=4), name="train")
    batches = iter(loader)
    next(batches)
    assert loader.state()["changing"] == ["dataset.number"]
    with pytest.warns(UserWarning, match="dataset.number"):
        next(batches)


def test_a_change_by_one_of_several_batches_is_none():
    opens = Opens()
    watch = Watch({"dataset": opens})
    opens[0]
    assert watch.poll_changes() == (False, ["dataset.length"])
    opens[0]
    assert watch.poll_changes() == (True, [])
