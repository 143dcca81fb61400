"""After a resume, a pass that is shorter, longer or repeats is reported; others pass in silence."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.pass_history import PassHistory, announced

BATCHES = 6  # of 4 in d.LENGTH samples


def history(*lengths, len_says=None, orders=None) -> PassHistory:
    """Return the history of passes of these lengths, in a pass that has begun."""
    digests = [b""] * len(lengths) if orders is None else list(orders)
    made = PassHistory()
    for length, order in zip(lengths, digests, strict=True):
        made = replace(made, announced=len_says).add(length, order)
    return replace(made, announced=len_says)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (history(), None),
        (history(len_says=6), None),
        (history(6), None),
        (history(6, len_says=6), 6),
        (history(6, len_says=7), None),
        (history(6, 6), 6),
        (history(6, 6, len_says=7), 6),
        (history(6, 5), None),
        (history(6, 5, 5), None),
        (replace(history(6, 6), announced=None), 6),
        (replace(history(6, 6, len_says=6), announced=8), 8),
    ],
)
def test_a_length_is_expected_if_len_was_right_or_two_passes_agree(before, expected):
    assert before.expected == expected


def test_a_pass_of_another_length_is_a_fault_and_names_the_numbers():
    alike, by_len = history(6, 6, 6), history(6, len_says=6)
    assert alike.fault(6, b"") == by_len.fault(6, b"") == alike.excess(6) == ""
    assert alike.fault(2, b"") == (
        "ended after 2 batches, where 6 were expected (as in each of the 3 passes before)"
    )
    assert by_len.fault(0, b"") == (
        "ended after 0 batches, where 6 were expected (by len(), which had been right)"
    )
    assert alike.excess(7).startswith("has a batch 7, where 6 were expected")


def test_a_length_that_passes_agree_on_is_expected_to_within_a_tenth():
    """Streams that filter or pack their samples agree by chance."""
    alike, by_len = history(20, 20), history(20, len_says=20)
    assert [alike.fault(batches, b"") != "" for batches in (17, 18, 22, 23)] == [1, 0, 0, 1]
    assert [alike.excess(batches) != "" for batches in (22, 23)] == [0, 1]
    assert by_len.fault(19, b"") != ""
    assert by_len.excess(21) != ""


def test_the_order_of_the_pass_before_is_a_fault_only_if_all_orders_had_differed():
    differing = history(6, 6, 6, orders=(b"one", b"two", b"three"))
    assert differing.fault(6, b"four") == differing.fault(6, b"") == ""
    assert "in the order of the pass before" in differing.fault(6, b"three")
    assert differing.fault(6, b"one") == ""  # as of shards that come by turns
    assert history(6, 8, orders=(b"one", b"two")).fault(8, b"two") == ""
    assert history(6, orders=(b"one",)).fault(6, b"one") == ""
    assert history(6, 6, 6, orders=(b"one", b"two", b"two")).fault(6, b"two") == ""
    assert history(5, 5, orders=(b"one", b"two")).fault(5, b"two") == ""  # too few batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [None, 1, 4, 23])
def test_announced_is_the_len_of_the_loader(size, drop_last):
    class Sized(d.Stream):
        def __len__(self) -> int:
            return d.LENGTH

    for dataset in (d.Plain(), Sized()):
        loader = DataLoader(dataset, batch_size=size, drop_last=drop_last and size is not None)
        facts = TrackedLoader(loader, name="train")._source.facts()
        assert announced(facts) == len(loader)


class Cut(d.OwnSampler):
    """Begins each pass at `first`, which `__len__` does not know."""

    first = more = 0

    def __iter__(self):
        order = list(super().__iter__())
        return iter(order[self.first :] + order[: self.more])


def sampled(**options) -> DataLoader:
    return DataLoader(d.Plain(), batch_size=4, sampler=Cut(), **options)


def resumed(make, passes, *, in_pass: int = 0) -> tuple:
    """Return a loader, plain and tracked, that goes on after passes and batches of the next."""
    first, second = make(), make()
    loader, tracked = (TrackedLoader(one, name="train") for one in (first, second))
    for epoch in range(passes):
        run_epoch(first, loader, epoch)
    if in_pass:
        iterator = iter(set_epoch(first, loader, passes))
        list(itertools.islice(iterator, in_pass))
    tracked.load_state(loader.state())
    return second, tracked


def set_epoch(loader, tracked, epoch: int) -> TrackedLoader:
    """Set the epoch of a sampler that has one; return the tracked loader."""
    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "epoch"):
            sampler.epoch = epoch
    return tracked


def run_epoch(loader, tracked, epoch: int) -> int:
    """Run one whole pass; return how many batches it brought."""
    return sum(1 for _ in set_epoch(loader, tracked, epoch))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shorter_pass_is_reported_with_its_numbers(workers):
    loader, tracked = resumed(lambda: sampled(num_workers=workers), 1, in_pass=3)
    assert run_epoch(loader, tracked, 1) == BATCHES - 3
    loader.sampler.first = 8
    with pytest.warns(UserWarning, match="epoch 2 ended after 4 batches, where 6 were expected"):
        run_epoch(loader, tracked, 2)
    assert run_epoch(loader, tracked, 3) == 4  # said once


def test_an_empty_pass_is_reported():
    loader, tracked = resumed(sampled, 1)
    loader.sampler.first = d.LENGTH
    with pytest.warns(UserWarning, match="epoch 1 ended after 0 batches, where 6 were expected"):
        run_epoch(loader, tracked, 1)


def test_a_longer_pass_is_reported_at_its_first_batch_too_many():
    loader, tracked = resumed(sampled, 2)
    loader.sampler.epoch, loader.sampler.more = 2, 8
    iterator = iter(tracked)
    list(itertools.islice(iterator, BATCHES))
    with pytest.warns(UserWarning, match="pass of epoch 2 has a batch 7, where 6 were expected"):
        next(iterator)
    assert sum(1 for _ in iterator) == 1


def test_a_pass_that_repeats_the_one_before_is_reported():
    loader, tracked = resumed(sampled, 3)
    with pytest.warns(UserWarning, match="epoch 3 had its 6 batches in the order of the pass befo"):
        run_epoch(loader, tracked, 2)


class Sticky(d.BeginsAnew):
    """Every second pass begins at what was loaded, for ever."""

    start, turn = 0, 0

    def load_state_dict(self, state) -> None:
        super().load_state_dict(state)
        self.start, self.turn = state["at"], 0

    def __iter__(self):
        self.turn += 1
        if self.turn % 2:
            self.loaded = self.loaded or self.start
        return super().__iter__()


class SizedSticky(Sticky):
    """Says how many samples it has."""

    def __len__(self) -> int:
        return d.LENGTH


@pytest.mark.parametrize(("kind", "passes"), [(SizedSticky, 0), (Sticky, 2)])
def test_a_stream_that_begins_where_it_was_loaded_is_reported(kind, passes):
    """Without a pass before, the resumed one shows that len() is right."""

    def make() -> DataLoader:
        return DataLoader(kind(), batch_size=4)

    loader, tracked = resumed(make, passes, in_pass=5)  # beyond the batches loaded again
    assert run_epoch(loader, tracked, passes) == BATCHES - 5
    assert run_epoch(loader, tracked, passes + 1) == BATCHES
    epoch = passes + 2
    with pytest.warns(UserWarning, match=f"epoch {epoch} ended after 0 batches, where 6 were exp"):
        run_epoch(loader, tracked, epoch)


class Uneven(IterableDataset):
    """Passes of other lengths; some agree, as by chance."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.turn, self.at = lengths, 0, 0

    def __iter__(self):
        while self.at < self.lengths[self.turn % len(self.lengths)]:
            self.at += 1
            yield torch.tensor(self.at)
        self.at, self.turn = 0, self.turn + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.turn = state["at"], state["turn"]


class UnevenBatches(Sampler):
    """Packs samples into as many batches as the epoch's order needs; `len()` says how many."""

    epoch, sampler = 0, SequentialSampler(range(d.LENGTH))

    def __len__(self) -> int:
        return len(self.packed())

    def __iter__(self):
        return iter(self.packed())

    def packed(self) -> list[list[int]]:
        size = random.Random(self.epoch).choice([2, 3, 4])
        return list(BatchSampler(self.sampler, size, False))


def uneven_batches() -> DataLoader:
    return DataLoader(d.Plain(), batch_sampler=UnevenBatches())


SILENT = {
    "set_epoch": sampled,
    "drop_last": lambda: sampled(drop_last=True),
    "workers": lambda: sampled(num_workers=1),
    "in order": lambda: DataLoader(d.Plain(), batch_size=4),
    "shuffled": lambda: DataLoader(d.Plain(), batch_size=4, shuffle=True),
    "few batches that repeat": lambda: DataLoader(torch.arange(2), shuffle=True),
    "lengths that vary": lambda: DataLoader(Uneven(20, 24, 24, 12, 28), batch_size=4),
    "stream": lambda: DataLoader(d.Stream(), batch_size=4),
    "stream with a state": lambda: DataLoader(d.BeginsAnew(), batch_size=4),
    "batch sampler": uneven_batches,
}


@pytest.mark.parametrize("in_pass", [0, 2])
@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of_passes_as_they_would_have_been(name, passes, in_pass):
    if in_pass and "few" in name:
        in_pass = 1
    loader, tracked = resumed(SILENT[name], passes, in_pass=in_pass)
    for epoch in range(passes, passes + 4):
        run_epoch(loader, tracked, epoch)
    assert tracked._history.count == passes + 4


def test_nothing_is_said_after_a_pass_was_left_early():
    """A stream that goes on where it was left has a shorter pass next."""

    def make() -> DataLoader:
        return DataLoader(d.GoesOn(), batch_size=4)

    loader, tracked = resumed(make, 2)
    for _ in zip(range(2), tracked, strict=False):
        pass
    assert run_epoch(loader, tracked, 3) == 4


def test_nothing_is_said_of_an_endless_stream():
    class Endless(d.Stream):
        def __iter__(self):
            return map(torch.tensor, itertools.count())

        def __len__(self) -> int:
            return d.LENGTH

    loader = DataLoader(Endless(), batch_size=4)
    tracked = TrackedLoader(loader, name="train")
    list(itertools.islice(iter(tracked), 3))
    second = TrackedLoader(DataLoader(Endless(), batch_size=4), name="train")
    second.load_state(tracked.state())
    assert len(list(itertools.islice(iter(second), 20))) == 20


def test_nothing_is_said_with_another_batch_size():
    first = TrackedLoader(DataLoader(d.Stream(), batch_size=4), name="train")
    for _ in range(3):
        list(first)
    tracked = TrackedLoader(DataLoader(d.Stream(), batch_size=3), name="train")
    tracked.load_state(first.state())
    assert [len(list(tracked)) for _ in range(2)] == [8, 8]


def test_nothing_is_said_with_another_number_of_ranks():
    def of_ranks(count: int) -> DataLoader:
        sampler = DistributedSampler(range(d.LENGTH), num_replicas=count, rank=0)
        return DataLoader(d.Plain(), batch_size=4, sampler=sampler)

    first = TrackedLoader(of_ranks(2), name="train")
    for _ in range(3):
        list(first)
    iterator = iter(first)
    next(iterator)
    first.record_window_start()
    tracked = TrackedLoader(of_ranks(1), name="train")
    list(tracked)
    tracked.load_in_other_world(first.state())
    assert tracked._history == PassHistory()
    assert [len(list(tracked)) for _ in range(3)] == [4, BATCHES, BATCHES]
    assert tracked._history.count == 2  # the rest of a pass is none


def test_nothing_is_said_after_a_batch_could_not_be_loaded():
    class Broken(d.Plain):
        fails = False

        def __getitem__(self, index: int):
            if self.fails and index == 5:
                raise OSError("once")
            return super().__getitem__(index)

    def make() -> DataLoader:
        return DataLoader(Broken(), batch_size=4)

    loader, tracked = resumed(make, 2)
    loader.dataset.fails = True
    iterator, came = iter(tracked), 0
    for _ in range(BATCHES):
        try:
            next(iterator)
            came += 1
        except OSError:
            pass
    assert next(iterator, None) is None
    assert came == BATCHES - 1


def test_a_state_of_an_older_release_expects_nothing():
    first = TrackedLoader(sampled(), name="train")
    for _ in range(3):
        list(first)
    state = first.state()
    del state["passes"]
    loader = sampled()
    tracked = TrackedLoader(loader, name="train")
    tracked.load_state(state)
    list(tracked)
    loader.sampler.first = 8
    assert len(list(tracked)) == 4


def test_the_fourth_pass_after_a_resume_is_not_compared():
    loader, tracked = resumed(sampled, 2)
    for epoch in (2, 3, 4):
        run_epoch(loader, tracked, epoch)
    loader.sampler.first = 8
    assert run_epoch(loader, tracked, 5) == 4


def test_nothing_is_said_of_a_run_that_was_not_resumed():
    loader = sampled()
    tracked = TrackedLoader(loader, name="train")
    for epoch in range(3):
        run_epoch(loader, tracked, epoch)
    loader.sampler.first = 8
    assert run_epoch(loader, tracked, 3) == 4
