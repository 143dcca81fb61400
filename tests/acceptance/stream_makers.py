"""The loaders of docs/streams.md: 96 samples in 4 shards, in batches of 4, each as a script has it.

Every maker is called with the number of workers and a `Source`, which counts the samples read,
also those that workers read.
"""

from __future__ import annotations

import itertools
import random
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, SHARD, BATCH = 96, 24, 4


class Source:
    """The samples of one run of a test, and the number of those that were read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counted = folder / "reads"
        self._counted.touch()

    def note(self, sample):
        """Return the sample, counted as read."""
        with self._counted.open("ab", buffering=0) as file:  # appended to by workers too
            file.write(b".")
        return sample

    @property
    def reads(self) -> int:
        return self._counted.stat().st_size


def column(rows):
    return torch.tensor([float(row["x"]) for row in rows])


def firsts(rows):
    return torch.tensor([float(row[0]) for row in rows])


def torch_loader(dataset, workers, collate=column, **options):
    return DataLoader(dataset, BATCH, num_workers=workers, collate_fn=collate, **options)


# ---- datasets


def rows_of(shards, source):
    for shard in shards:
        for number in range(shard * SHARD, (shard + 1) * SHARD):
            yield {"x": source.note(number)}


def hub_rows(source, *, shards=(0, 1, 2, 3)):
    """A stream of datasets."""
    datasets = pytest.importorskip("datasets")
    options = {"shards": list(shards), "source": source}
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs=options)


def shuffled(rows):
    return rows.shuffle(seed=3, buffer_size=10)


def hub_list(workers, source):
    datasets = pytest.importorskip("datasets")

    def counted(batch):
        for number in batch["x"]:
            source.note(number)
        return batch

    rows = datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).with_transform(counted)
    return torch_loader(rows, workers, shuffle=True)


def interleaved(**options):
    def make(workers, source):
        datasets = pytest.importorskip("datasets")
        parts = [hub_rows(source, shards=shards) for shards in ((0, 1), (2, 3))]
        return torch_loader(datasets.interleave_datasets(parts, **options), workers)

    return make


def second_node(rows):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(rows, rank=1, world_size=2)


def of_hub(change=lambda rows: rows, loader=torch_loader):
    return lambda workers, source: loader(change(hub_rows(source)), workers)


# ---- webdataset


def tar_rows(source, *, change=lambda rows: rows, **options):
    """A stream of webdataset from four files."""
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        place = source.folder / f"{shard}.tar"
        if not place.exists():
            with wds.TarWriter(str(place)) as tar:
                for number in range(shard * SHARD, (shard + 1) * SHARD):
                    tar.write({"__key__": f"{number:04}", "x.txt": str(number)})
    options = {"shardshuffle": False, "empty_check": False, **options}
    rows = wds.WebDataset(str(source.folder / "{0..3}.tar"), **options).map(source.note)
    return change(rows).decode().to_tuple("x.txt")


def of_tars(**options):
    return lambda workers, source: torch_loader(tar_rows(source, **options), workers, firsts)


def in_other_orders(workers, source):
    wds = pytest.importorskip("webdataset")
    options = {"shardshuffle": 4, "detshuffle": True, "seed": 3}
    rows = tar_rows(source, change=lambda r: r.compose(wds.detshuffle(10, seed=3)), **options)
    return torch_loader(rows, workers, firsts, persistent_workers=workers > 0)


def web_loader(workers, source):
    wds = pytest.importorskip("webdataset")
    rows = tar_rows(source, change=lambda rows: rows.shuffle(10, seed=3))
    return wds.WebLoader(rows, batch_size=BATCH, num_workers=workers, collate_fn=firsts)


# ---- torchdata, and torch


class Samples(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return {"x": self.source.note(number)}


class Stream(IterableDataset):
    """Without a state."""

    def __init__(self, source):
        self.source = source

    def numbers(self):
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return range(start, SAMPLES, step)

    def __iter__(self):
        for number in self.numbers():
            yield {"x": self.source.note(number)}


class StreamWithState(Stream):
    def __init__(self, source):
        super().__init__(source)
        self.position = self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for position, number in enumerate(self.numbers()[start:], start + 1):
            self.position = position
            yield {"x": self.source.note(number)}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = self.position = state["position"]


def stateful_loader(dataset, workers, **options):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"num_workers": workers, "collate_fn": column, **options}
    return stateful.StatefulDataLoader(dataset, BATCH, **options)


def mapped(node, function, workers):
    tn = pytest.importorskip("torchdata.nodes")
    if not workers:
        return tn.Mapper(node, function)
    return tn.ParallelMapper(node, function, num_workers=workers, method="thread")


def nodes_of_a_sampler(workers, source):
    tn = pytest.importorskip("torchdata.nodes")
    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3))
    node = mapped(tn.SamplerWrapper(sampler), Samples(source).__getitem__, workers)
    return tn.Loader(tn.Mapper(tn.Batcher(node, BATCH), column))


def nodes_of_a_stream(change):
    def make(workers, source):
        tn = pytest.importorskip("torchdata.nodes")
        node = tn.Batcher(tn.IterableWrapper(change(hub_rows(source))), BATCH)
        return tn.Loader(tn.Prefetcher(mapped(node, column, workers), 3))

    return make


def nodes_of_two(workers, source):
    tn = pytest.importorskip("torchdata.nodes")
    sizes = {"low": SAMPLES // 2, "high": SAMPLES // 2}
    samplers = {
        name: tn.SamplerWrapper(DistributedSampler(range(size), 1, 0, seed=len(name)))
        for name, size in sizes.items()
    }
    node = tn.MultiNodeWeightedSampler(samplers, {"low": 0.3, "high": 0.7}, seed=5)
    node = mapped(node, Samples(source).__getitem__, workers)
    return tn.Loader(tn.Mapper(tn.Batcher(node, BATCH), column))


# ---- streaming and litdata, which need torchvision


def mosaic(loader=None):
    def make(workers, source):
        streaming = pytest.importorskip("streaming")
        place = source.folder / "mds"
        if not place.exists():
            with streaming.MDSWriter(out=str(place), columns={"x": "int"}, size_limit=400) as out:
                for number in range(SAMPLES):
                    out.write({"x": number})

        class Rows(streaming.StreamingDataset):
            def __getitem__(self, index):
                return source.note(super().__getitem__(index))

        streaming.base.util.clean_stale_shared_memory()
        rows = Rows(local=str(place), batch_size=BATCH, shuffle=True, shuffle_seed=3)
        kind = loader or streaming.StreamingDataLoader
        return kind(rows, batch_size=BATCH, num_workers=workers, collate_fn=column)

    return make


def litdata(loader=None):
    def make(workers, source):
        lit = pytest.importorskip("litdata")
        place = source.folder / "lit"
        if not place.exists():
            from litdata.streaming.writer import BinaryWriter

            place.mkdir()
            writer = BinaryWriter(str(place), chunk_size=8)
            for number in range(SAMPLES):
                writer[number] = {"x": number}
            writer.done(), writer.merge()

        class Rows(lit.StreamingDataset):
            def __getitem__(self, index):
                return source.note(super().__getitem__(index))

        rows = Rows(str(place), shuffle=True, seed=3)
        kind = loader or lit.StreamingDataLoader
        return kind(rows, batch_size=BATCH, num_workers=workers, collate_fn=column)

    return make


# ---- packing, by the examples of the page


class Documents(Dataset):
    """Documents of one to six tokens, each token a number of its own."""

    def __init__(self, source):
        lengths = random.Random(3).choices(range(1, 7), k=SAMPLES)
        ends = list(itertools.accumulate(lengths))
        self.source = source
        self.tokens = [[*range(end - n, end)] for end, n in zip(ends, lengths, strict=True)]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        if number >= SAMPLES:
            raise IndexError(number)
        return self.source.note(self.tokens[number])


def without_state(kind):
    """The class, with no state_dict and load_state_dict."""
    return type(kind.__name__, (kind,), {"state_dict": None, "load_state_dict": None})


def packed_batches(kind):
    return lambda workers, source: torch_loader(Documents(source), workers, kind(5), shuffle=True)


def packed_stream(kind):
    def make(workers, source):
        return DataLoader(kind(Documents(source), 5), BATCH, num_workers=workers)

    return make


# ---- producers


class Maker:
    """Makes batches on threads: of each two items, the second is finished before the first."""

    def __init__(self, source):
        self.source, self.producer = source, None
        self.finished = [threading.Event() for _ in range(SAMPLES // BATCH)]

    def __call__(self, item):
        if item % 2 == 0 and not self.is_trained(item + 1):
            self.finished[item + 1].wait()
        self.finished[item].set()
        numbers = range(item * BATCH, (item + 1) * BATCH)
        return torch.tensor([float(self.source.note(number)) for number in numbers])

    def is_trained(self, item):
        return item < self.producer.cursor and item not in self.producer.in_flight


def producer(kind):
    def make(workers, source):
        maker = Maker(source)
        maker.producer = kind(range(SAMPLES // BATCH), maker, threads=2 + workers)
        return maker.producer

    return make


# ---- the rows of the table


def makers(examples):
    """Return the maker of each row; `examples`: the classes of the page's examples."""
    probabilities = {"probabilities": [0.3, 0.7], "seed": 5, "stopping_strategy": "all_exhausted"}
    return {
        "datasets.Dataset, shuffled": hub_list,
        "datasets.IterableDataset": of_hub(),
        "datasets.IterableDataset, .shuffle(buffer_size)": of_hub(shuffled),
        "datasets.interleave_datasets": interleaved(),
        "datasets.interleave_datasets, probabilities": interleaved(**probabilities),
        "datasets.split_dataset_by_node": of_hub(second_node),
        "datasets.split_dataset_by_node, .shuffle(buffer_size)": of_hub(
            lambda rows: second_node(shuffled(rows))
        ),
        "WebDataset": of_tars(),
        "WebDataset, .shuffle(seed)": of_tars(change=lambda rows: rows.shuffle(10, seed=3)),
        "WebDataset, .shuffle without a seed": of_tars(change=lambda rows: rows.shuffle(10)),
        "WebDataset, shardshuffle, seed": of_tars(shardshuffle=4, seed=3),
        "WebDataset, shardshuffle without a seed": of_tars(shardshuffle=4),
        "WebDataset, detshuffle of shards and samples": in_other_orders,
        "WebDataset, nodesplitter": of_tars(nodesplitter=every_second),
        "webdataset.WebLoader": web_loader,
        "IterableDataset with state_dict": lambda workers, source: torch_loader(
            StreamWithState(source), workers
        ),
        "IterableDataset without state_dict": lambda workers, source: torch_loader(
            Stream(source), workers
        ),
        "StatefulDataLoader, map-style, shuffled": lambda workers, source: stateful_loader(
            Samples(source), workers, shuffle=True
        ),
        "StatefulDataLoader, IterableDataset with state_dict": lambda workers, source: (
            stateful_loader(StreamWithState(source), workers)
        ),
        "StatefulDataLoader, IterableDataset without": lambda workers, source: stateful_loader(
            Stream(source), workers
        ),
        "StatefulDataLoader, datasets.IterableDataset": of_hub(loader=stateful_loader),
        "StatefulDataLoader, datasets, .shuffle(buffer_size)": of_hub(shuffled, stateful_loader),
        "torchdata.nodes, SamplerWrapper": nodes_of_a_sampler,
        "torchdata.nodes, MultiNodeWeightedSampler": nodes_of_two,
        "torchdata.nodes, datasets.IterableDataset": nodes_of_a_stream(lambda rows: rows),
        "torchdata.nodes, datasets, .shuffle(buffer_size)": nodes_of_a_stream(shuffled),
        "streaming.StreamingDataLoader": mosaic(),
        "streaming.StreamingDataset, torch's DataLoader": mosaic(DataLoader),
        "litdata.StreamingDataLoader": litdata(),
        "litdata.StreamingDataset, torch's DataLoader": litdata(DataLoader),
        "collate_fn that packs, with state_dict": packed_batches(examples["Packing"]),
        "collate_fn that packs, without": packed_batches(without_state(examples["Packing"])),
        "stream that packs, with state_dict": packed_stream(examples["PackedStream"]),
        "producer out of order, cursor and items in flight": producer(examples["Producer"]),
    }


def every_second(shards):
    """Return the shards of the second of two nodes."""
    return itertools.islice(shards, 1, None, 2)
