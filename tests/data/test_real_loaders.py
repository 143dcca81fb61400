"""Loaders and datasets of other projects, stopped in the middle of passes and between them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError

pytestmark = pytest.mark.long  # `make test-long` installs these packages

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


@pytest.mark.parametrize(("size", "refills"), [(6, True), (100, False)])
def test_a_shuffle_buffer_of_datasets_is_filled_again_where_it_is_lost(hf, size, refills, recwarn):
    data = hf.Dataset.from_dict({"x": list(range(60))})

    def make():
        rows = data.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=size)
        return DataLoader(rows, batch_size=4, collate_fn=column)

    assert_exact(make, (1, 3, 6, 12, 16, 17, 20, 27))
    lost = "train: the state of IterableDataset does not lead to the samples that came after it"
    assert any(str(one.message).startswith(lost) for one in recwarn) == refills


@pytest.mark.parametrize("persistent", [False, True], ids=["", "kept"])
def test_a_stream_of_datasets_in_workers_is_exact_and_nothing_is_said(hf, persistent):
    def make():
        rows = streams(hf)["shards"]().shuffle(seed=3, buffer_size=6)
        options = {"num_workers": 2, "persistent_workers": persistent}
        return DataLoader(rows, batch_size=4, collate_fn=column, **options)

    assert_exact(make, (3, 11))


def webdataset_in(folder):
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for row in range(5):
                tar.write({"__key__": f"{shard}{row}", "n.txt": str(shard * 5 + row)})

    def make(workers):
        rows = wds.WebDataset(
            str(folder / "{0..3}.tar"), shardshuffle=4, detshuffle=True, seed=3, empty_check=False
        )
        rows = rows.shuffle(6, seed=3).decode().to_tuple("n.txt")
        return DataLoader(rows, batch_size=4, num_workers=workers, collate_fn=texts)

    return make


def test_a_seeded_stream_of_webdataset_in_workers_is_exact_and_nothing_is_said(tmp_path):
    make = webdataset_in(tmp_path)
    assert_exact(lambda: make(2), (3, 11))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its open files
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_one_that_counts_its_epochs_in_this_process_is_exact(tmp_path):
    make = webdataset_in(tmp_path)
    assert_exact(lambda: make(0), (3, 6, 7, 11))


def test_shards_that_are_resampled_by_the_time_are_refused(tmp_path):
    wds = pytest.importorskip("webdataset")
    rows = wds.WebDataset(
        str(tmp_path / "{0..3}.tar"), resampled=True, shardshuffle=False, empty_check=False
    )
    with pytest.raises(ConfigurationError, match=r"ResampledShards\(urls, deterministic=True\)"):
        TrackedLoader(DataLoader(rows), name="train")


def test_samples_that_are_resampled_by_the_time_are_refused(tmp_path):
    wds = pytest.importorskip("webdataset")
    stages = (wds.shardlists.resampled(100), wds.tarfile_to_samples())
    rows = wds.DataPipeline(wds.SimpleShardList(str(tmp_path / "{0..3}.tar")), *stages)
    with pytest.raises(ConfigurationError, match=r"ResampledShards\(urls, deterministic=True\)"):
        TrackedLoader(DataLoader(rows), name="train")


def texts(rows):
    return torch.tensor([int(text) for (text,) in rows])


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
