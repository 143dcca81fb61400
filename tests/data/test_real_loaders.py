"""Loaders and datasets of other projects, stopped in the middle of passes and between them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError

STOPS = range(1, 19)  # passes of five batches


def assert_exact(make, stops=STOPS, **how) -> None:
    want = d.straight(make, **how)
    for stop in stops:
        before, after = d.interrupted(make, stop, **how)
        assert before + after == want, f"stopped at boundary {stop}"


class Plainly:
    """A loader of nodes as the loops of these tests read one."""

    sampler = batch_sampler = generator = None


def nodes(sampler):
    tn = pytest.importorskip("torchdata.nodes")

    class Loader(Plainly, tn.Loader):
        def __iter__(self):
            return map(torch.tensor, super().__iter__())

    return Loader(tn.Batcher(tn.SamplerWrapper(sampler), 2))


@pytest.mark.parametrize("limit", [None, 2], ids=["run out", "left"])
def test_nodes_go_on_in_the_order_of_a_sampler_s_own_generator(limit):
    def make():
        generator = torch.Generator().manual_seed(5)
        return nodes(RandomSampler(range(10), generator=generator))

    assert_exact(make, range(1, 7) if limit else STOPS, limit=limit)


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "generator"])
@pytest.mark.parametrize("limit", [None, 2], ids=["run out", "left"])
def test_a_stateful_loader_goes_on_whoever_draws_its_order(kind, limit):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        generator = torch.Generator().manual_seed(5)
        options = {
            "shuffle": {"shuffle": True},
            "weighted": {"sampler": WeightedRandomSampler([1.0] * 5 + [3.0] * 5, 10)},
            "generator": {"sampler": RandomSampler(range(10), generator=generator)},
        }
        return stateful.StatefulDataLoader(range(10), batch_size=2, **options[kind])

    # Saved after its first batch ever, what it draws late cannot be told from what it always draws.
    late = kind == "weighted"
    assert_exact(make, range(3 if late else 1, 7) if limit else STOPS[2 * late :], limit=limit)


@pytest.fixture
def hf():
    """Datasets of Hugging Face."""
    return pytest.importorskip("datasets")


def streams(hf):
    data = hf.Dataset.from_dict({"x": list(range(20))})
    return {
        "plain": lambda: data.to_iterable_dataset(),
        "shards": lambda: data.to_iterable_dataset(num_shards=4),
        "mapped": lambda: data.to_iterable_dataset().map(lambda row: {"x": row["x"] + 1}),
        "interleaved": lambda: hf.interleave_datasets(
            [data.to_iterable_dataset(), data.to_iterable_dataset()]
        ),
    }


def column(rows):
    return torch.tensor([row["x"] for row in rows])


@pytest.mark.parametrize("kind", ["plain", "shards", "mapped", "interleaved"])
def test_a_stream_of_datasets_ends_its_pass_and_begins_the_next_at_its_beginning(hf, kind):
    make = streams(hf)[kind]
    number = 10 if kind == "interleaved" else 5
    assert_exact(
        lambda: DataLoader(make(), batch_size=4, collate_fn=column),
        (1, 2, number, number + 1, number + 2, number + 4, 2 * number + 3),
    )


class Rows(Plainly):
    """A stream of datasets as the loader."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        return (torch.tensor(row["x"]) for row in self.rows)

    def state_dict(self):
        return self.rows.state_dict()

    def load_state_dict(self, state):
        self.rows.load_state_dict(state)


def test_a_stream_of_datasets_is_a_loader_too(hf):
    assert_exact(lambda: Rows(streams(hf)["shards"]()), (1, 5, 20, 21, 22, 25))


def test_a_stateful_loader_over_a_stream_of_datasets_begins_each_pass_at_its_beginning(hf):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return stateful.StatefulDataLoader(streams(hf)["plain"](), batch_size=4, collate_fn=column)

    assert_exact(make)


def test_a_stream_of_litdata_in_a_plain_loader_is_refused_with_the_loader_to_use():
    litdata = pytest.importorskip("litdata")
    stream = object.__new__(litdata.StreamingDataset)  # which needs files otherwise
    with pytest.raises(ConfigurationError, match="without num_samples_yielded and nu") as refused:
        TrackedLoader(DataLoader(stream), name="train")
    assert "use litdata.StreamingDataLoader" in str(refused.value)
