"""A run interrupted at any batch equals the uninterrupted run, and that of the plain loader."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError, StateMismatch

KINDS = {"no workers": (0, False), "2": (2, False), "3": (3, False), "3 kept": (3, True)}


def plain(workers=2, persistent=False, generator=False, dataset=None, start="fork", **options):
    """Return a function that makes the same DataLoader again and again; samplers as functions."""

    def make() -> DataLoader:
        now = dict(options)
        for key in {"sampler", "batch_sampler"} & set(options):
            now[key] = options[key]()
        if generator:
            now["generator"] = torch.Generator().manual_seed(3)
        if not {"sampler", "batch_sampler"} & set(options):
            now.setdefault("shuffle", True)
        if "batch_sampler" not in options:
            now.setdefault("batch_size", 4)
        context = start if workers else None
        return DataLoader(
            d.Augmented() if dataset is None else dataset,
            num_workers=workers,
            persistent_workers=persistent,
            multiprocessing_context=context,
            **now,
        )

    return make


def assert_exact(make, stops, **how) -> None:
    want = d.straight(make, **how)
    for stop in stops:
        before, after = d.interrupted(make, stop, **how)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize(
    ("generator", "drop_last"),
    [
        pytest.param(False, False, id="", marks=pytest.mark.long),
        pytest.param(False, True, id="drop_last"),
        pytest.param(True, False, id="generator"),
        pytest.param(True, True, id="generator-drop_last", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_at_any_boundary_goes_on_bitwise(kind, generator, drop_last):
    """Before the first batch, in an epoch, after its last batch, between epochs, and later."""
    workers, persistent = KINDS[kind]
    per_epoch = (5 if drop_last else 6) + 1  # one boundary finds the epoch exhausted
    make = plain(workers, persistent, generator, drop_last=drop_last)
    stops = range(1, 3 * per_epoch + 1)
    if workers:
        stops = (2, per_epoch, per_epoch + 1, per_epoch + 4) if persistent else (1, per_epoch + 3)
    assert_exact(make, stops)


def test_spawned_workers_are_exact_too():
    """Taps, seeds and generators reach the workers through pickle."""
    want = d.straight(plain(2, True), epochs=2)
    before, after = d.interrupted(plain(2, True, start="spawn"), 10, epochs=2)
    assert before + after == want


def test_workers_of_a_fork_server_are_exact_too():
    """As spawn, but the parent of the workers is not us."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.datasets"])
    want = d.straight(plain(2), epochs=2)
    before, after = d.interrupted(plain(2, start="forkserver"), 3, epochs=2)
    assert before + after == want


def distributed() -> DistributedSampler:
    return DistributedSampler(range(d.LENGTH), num_replicas=2, rank=1, seed=5)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, d.LENGTH + 1), d.LENGTH)


def batches() -> BatchSampler:
    own = torch.Generator().manual_seed(11)
    return BatchSampler(RandomSampler(range(d.LENGTH), generator=own), 5, False)


OPTIONS = {
    "DistributedSampler": {"sampler": distributed},
    "WeightedRandomSampler": {"sampler": weighted},
    "BatchSampler": {"batch_sampler": batches},
    "custom": {"sampler": d.OwnSampler},
    "stateful sampler": {"sampler": d.StatefulSampler},
    "no batching": {"batch_size": None, "generator": True},
    "prefetch and init": {"prefetch_factor": 3, "worker_init_fn": d.init_that_draws},
    "pinned": {"pin_memory": True, "shuffle": False},
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize(
    "persistent",
    [pytest.param(False, id=""), pytest.param(True, id="kept", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_way_of_ordering_and_batching_is_exact(option, persistent):
    """Samplers with seeds, generators or state of their own, and options that change timing."""
    assert_exact(plain(2, persistent, **OPTIONS[option]), (3, 10))


@pytest.mark.parametrize("kind", ["no workers", "2", "3 kept"])
def test_epochs_that_are_left_early_stay_exact(kind):
    """Batches fetched ahead and dropped move kept workers' generators; so must a resume."""
    assert_exact(plain(*KINDS[kind]), (3, 4, 6), limit=3)


def test_nothing_is_loaded_twice(tmp_path):
    """The resumed process loads the remaining samples of the epoch and no others."""
    log = tmp_path / "loads"
    make = plain(2, dataset=d.Augmented(log), shuffle=False)
    d.seed_all(7)
    first = d.Run(make(), stop=4)
    with pytest.raises(d.StoppedError):
        first.train()
    first.loader.shutdown()
    log.unlink()
    d.Run(make()).load(first.saved).train(epochs=1)
    assert sorted(map(int, log.read_text().split())) == list(range(12, d.LENGTH))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_counts_batches_samples_and_passes(workers):
    """Counted is what was returned; the last batch is uneven."""
    tracked = TrackedLoader(plain(workers)(), name="train")
    assert (tracked.in_pass, tracked.passes_started, len(tracked)) == (False, 0, 6)
    batches = iter(tracked)
    next(batches), next(batches)
    assert (tracked.batches, tracked.samples, tracked.in_pass) == (2, 8, True)
    assert sum(1 for _ in batches) == 4
    assert (tracked.batches, tracked.samples, tracked.in_pass) == (6, d.LENGTH, False)
    assert (tracked.exhausted, tracked.passes_started) == (True, 1)
    assert next(batches, "over") == "over"


def test_a_loaded_state_is_returned_until_the_pass_goes_on():
    """Also at the first boundary, and with an iterator made before the load."""
    make = plain(0)
    d.seed_all(7)
    first = TrackedLoader(make(), name="train")
    running = iter(first)
    next(running)
    state = first.state()
    seen = []
    second = TrackedLoader(make(), name="train", on_boundary=lambda: seen.append(second.state()))
    early = iter(second)
    second.load_state(state)
    assert d.comparable(second.state()) == d.comparable(state)
    second.on_boundary = lambda: seen.append(d.comparable(second.state()))
    next(early)
    assert seen == [d.comparable(state)]
    assert second.batches == 2


def test_a_state_holds_plain_values_only():
    """None, numbers, text, bytes, containers of them, dense CPU tensors."""
    tracked = TrackedLoader(plain(2, True, True)(), name="train")
    batches = iter(tracked)
    next(batches)
    assert_plain(tracked.state())
    tracked.shutdown()


def assert_plain(value) -> None:
    if isinstance(value, dict):
        assert all(type(key) in (str, int) for key in value)
        value = list(value.values())
    if type(value) in (list, tuple):
        for item in value:
            assert_plain(item)
    else:
        assert type(value) in (type(None), bool, int, float, str, bytes, torch.Tensor)


def test_a_state_is_never_changed_later():
    """A snapshot may be written while training goes on."""
    tracked = TrackedLoader(plain(2, True, True)(), name="train")
    batches = iter(tracked)
    next(batches)
    state = tracked.state()
    before = d.comparable(state)
    assert sum(1 for _ in batches) + sum(1 for _ in tracked) == 11
    assert d.comparable(state) == before
    tracked.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_dataset_comes_through_and_keeps_the_position(workers):
    """The batch that failed was consumed, as in the plain loader; a resume does not retry it."""
    make = plain(workers, dataset=d.Refusing(), shuffle=False)
    tracked = TrackedLoader(make(), name="train")
    batches = iter(tracked)
    next(batches)
    with pytest.raises(LookupError, match="sample 5 is damaged"):
        next(batches)
    assert next(batches).tolist() == [8, 9, 10, 11]
    again = TrackedLoader(make(), name="train")
    again.load_state(tracked.state())
    assert next(iter(again)).tolist() == [12, 13, 14, 15]


def test_the_users_loader_is_not_changed():
    """Iterators are made over a copy; unknown attributes come from the loader."""
    loader = plain(2, True)()
    collate = loader.collate_fn
    tracked = TrackedLoader(loader, name="train")
    assert sum(1 for _ in tracked) == 6
    assert loader.collate_fn is collate
    assert (loader.worker_init_fn, loader._iterator) == (None, None)
    assert tracked.dataset is loader.dataset
    tracked.shutdown()


def test_a_pass_that_was_left_cannot_go_on():
    """One position, one pass at a time."""
    tracked = TrackedLoader(plain(0)(), name="train")
    old = iter(tracked)
    next(old)
    next(iter(tracked))
    with pytest.raises(ConfigurationError, match="train: this pass was left"):
        next(old)


def test_an_object_with_its_own_state_is_used_through_it():
    """As torchdata's StatefulDataLoader."""
    first = TrackedLoader(d.Countdown(), name="train")
    batches = iter(first)
    assert [next(batches), next(batches)] == [4, 3]
    second = TrackedLoader(d.Countdown(), name="train")
    second.load_state(first.state())
    assert list(second) == [2, 1, 0]
    assert list(second) == [4, 3, 2, 1, 0]
    assert second.passes_started == 2


STREAMS = [d.StatefulStream, d.GoesOn, d.CountsPasses, d.BeginsAnew, d.BeginsLate, d.OtherOrders]
STREAMS += [d.StaysLoaded, d.StaysLoadedLate, d.Peeked, d.Wrapping, d.StaysInEpoch]


@pytest.mark.parametrize("limit", [None, 2], ids=["run out", "left"])
@pytest.mark.parametrize("dataset", STREAMS)
def test_a_stream_with_state_goes_on_from_any_boundary_those_between_passes_included(
    dataset, limit
):
    """Whatever a new pass over it is: it goes on, begins anew, or has an order of its own."""
    boundaries = 3 * (limit or 6 + 1)
    assert_exact(lambda: DataLoader(dataset(), batch_size=4), range(1, boundaries + 1), limit=limit)


@pytest.mark.parametrize("dataset", STREAMS)
def test_a_stream_resumed_at_the_end_of_a_pass_can_be_stopped_again_before_the_next(dataset):
    """What is saved there is what was loaded: the dataset itself was not put anywhere yet."""

    def make() -> DataLoader:
        return DataLoader(dataset(), batch_size=4)

    assert d.stopped_again_and_again(make, (7, 2, 1, 7, 2)) == d.straight(make)


@pytest.mark.parametrize(
    ("dataset", "doubt"),
    [(d.TurnsWhenLoaded, "no way that was tried"), (d.OnePass, "LookupError: load a state first")],
)
def test_a_stream_whose_place_between_passes_cannot_be_found_goes_on_with_a_warning(dataset, doubt):
    first = d.Run(DataLoader(dataset(), batch_size=4), stop=3, limit=2)
    with pytest.raises(d.StoppedError):
        first.train()
    second = d.Run(DataLoader(dataset(), batch_size=4)).load(first.saved)
    message = rf"train: the place of {dataset.__name__} between two passes is inferred .*{doubt}"
    with pytest.warns(UserWarning, match=message):
        next(iter(second.loader))


def test_a_stream_that_would_have_to_begin_where_no_state_is_known_says_what_to_change():
    """Its passes would all be empty: that is not gone on with."""
    first = d.Run(DataLoader(d.StaysLoadedInside(), batch_size=4), stop=8)
    with pytest.raises(d.StoppedError):
        first.train()
    second = d.Run(DataLoader(d.StaysLoadedInside(), batch_size=4)).load(first.saved)
    with pytest.raises(ConfigurationError, match="begins at the state that was loaded") as error:
        second.train()
    assert "from __init__ on" in str(error.value)


def test_a_stream_with_state_goes_on_by_it():
    """Without workers nothing is fetched ahead, so the dataset's own position is the position."""
    make = plain(0, dataset=None, shuffle=None)
    first = TrackedLoader(DataLoader(d.StatefulStream(), batch_size=4), name="train")
    batches = iter(first)
    next(batches)
    second = TrackedLoader(DataLoader(d.StatefulStream(), batch_size=4), name="train")
    second.load_state(first.state())
    assert len(list(second)) == math.ceil(d.LENGTH / 4) - 1
    assert first.problems() == []
    with pytest.raises(StateMismatch, match="kind iterable, is map"):
        TrackedLoader(make(), name="train").load_state(first.state())
