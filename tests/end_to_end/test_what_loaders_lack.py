"""A resume says of each loader what its snapshot does not hold."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.data.datasets import KeptPacks, Packs
from tests.end_to_end.training import record
from trainckpt import Checkpointer


class Numbers(IterableDataset):
    """A stream without a state."""

    def __iter__(self):
        return iter(torch.arange(40.0))


class OwnPosition(DataLoader):
    """A loader that keeps its position itself."""

    at = skip = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.skip = state["at"]

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for self.at, batch in enumerate(super().__iter__(), start=1):
            if self.at > skip:
                yield batch


def attempt(place, packs, until: int, data=None, workers: int = 0) -> list[list[float]]:
    """Train up to a micro-batch; return what it was trained on."""
    data = torch.arange(40.0) if data is None else data
    loader = DataLoader(data, 4, collate_fn=packs, num_workers=workers)
    return train(place, loader, until)


def train(place, loader, until: int, *, late: bool = False) -> list[list[float]]:
    """As `attempt`; `late`: the loader is registered once the run has resumed."""
    model, seen = nn.Linear(1, 1), []
    tracked = {} if late else {"loader": loader}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(place, model=model, optimizer=optimizer, **tracked) as ckpt:
        batches = ckpt.loader(loader)
        for _ in ckpt.epochs(2):
            for batch in batches:
                seen.append(batch.tolist())
                model(batch[:, None] / 40).sum().backward()
                optimizer.step()
                if ckpt.cursor.micro_batches == until - 1:
                    return seen
    return seen


def test_a_remainder_that_is_not_kept_is_named_and_one_that_is_kept_goes_on(tmp_path):
    straight = attempt(tmp_path / "straight", KeptPacks(), 99)
    for until in (4, 13):
        place = tmp_path / f"kept{until}"
        came = attempt(place, KeptPacks(), until) + attempt(place, KeptPacks(), 99)
        assert came == straight
        assert record(place, 2)["outcome"]["exactness"] == "bitwise"
    place = tmp_path / "lost"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each attempt warns as it trains
        attempt(place, Packs(), 4), attempt(place, Packs(), 5)
    assert record(place, 2)["outcome"]["exactness"] == "same data, not bitwise"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("until", [pytest.param(3, marks=pytest.mark.long), 13])
def test_packs_of_any_loader_go_on_without_a_repeat_or_are_named(tmp_path, workers, stream, until):
    """llm-foundry#1277: in each epoch, of a stream or a list, by workers or not."""

    def packed(place, packs, until):
        data = Numbers() if stream else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return attempt(tmp_path / place, packs, until, data, workers)

    straight = packed("straight", KeptPacks(), 99)
    came = packed("kept", KeptPacks(), until) + packed("kept", KeptPacks(), 99)
    exactness = record(tmp_path / "kept", 2)["outcome"]["exactness"]
    assert (came == straight) == (exactness != "same data, not bitwise")
    assert came == straight or workers
    came = packed("lost", Packs(), until) + packed("lost", Packs(), 99)
    exactness = record(tmp_path / "lost", 2)["outcome"]["exactness"]
    assert came == straight or exactness == "same data, not bitwise"


@pytest.mark.parametrize("late", [False, True])
def test_the_resume_line_says_whose_word_it_takes(tmp_path, caplog, late):
    caplog.set_level("INFO", "trainckpt")
    loaders = {
        "replayed and compared (loader)": lambda: DataLoader(Numbers(), 4),
        "as exact as OwnPosition's own state (loader)": lambda: OwnPosition(torch.arange(40.0), 4),
    }
    for number, (word, make) in enumerate(loaders.items()):
        place = tmp_path / f"run{number}"
        came = train(place, make(), 13, late=late) + train(place, make(), 99, late=late)
        assert came == 2 * [batch.tolist() for batch in torch.arange(40.0).split(4)]
        assert f"this resume is {word}" in caplog.text
        assert record(place, 2)["outcome"]["exactness"] == word


class Turning(Sampler):
    """Has another order in each process, and says nothing of it."""

    made = 0

    def __init__(self) -> None:
        Turning.made += 1
        self.order = torch.randperm(40, generator=torch.Generator().manual_seed(self.made)).tolist()

    def __iter__(self):
        return iter(self.order)

    def __len__(self) -> int:
        return 40


class Forgetting(Turning):
    """Has a state, and its order is not in it."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_a_sampler_with_state_is_not_told_to_have_one(tmp_path, caplog):
    for until in (4, 99):
        train(tmp_path, DataLoader(torch.arange(40.0), 4, sampler=Forgetting()), until)
    assert "draw the whole order at the head of __iter__" in caplog.text


@pytest.mark.parametrize("late", [False, True])
def test_an_order_that_does_not_come_again_is_said_and_recorded(tmp_path, caplog, late):
    for until in (4, 99):
        train(tmp_path, DataLoader(torch.arange(40.0), 4, sampler=Turning()), until, late=late)
    assert "not exact: loader: the order that Turning begins with is not the one" in caplog.text
    outcome = record(tmp_path, 2)["outcome"]
    assert outcome["exactness"] == "same data, not bitwise"
    assert [(part["name"], part["how"]) for part in outcome["restored"]] == [("loader", "not kept")]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_loader_registered_after_the_resume_cannot_do_is_recorded(tmp_path, late):
    for until in (4, 99):
        loader = DataLoader(torch.arange(40.0), 4, in_order=False, num_workers=1)
        train(tmp_path, loader, until, late=late)
    assert record(tmp_path, 2)["outcome"]["exactness"] == "same data, not bitwise"
