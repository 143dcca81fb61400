"""A loader goes back to its window's start in another data world, and exactly on in the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tests.data import datasets as d
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.sampler import set_epoch
from trainckpt.errors import StateMismatch


def dealt(ranks: int, rank: int = 0, *, batch: int = 2, drop_last=False, shuffle=True, **options):
    """A plain loader of one of `ranks` data ranks over 23 samples."""
    data = options.pop("data", None) or d.Plain()
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=4)
    return DataLoader(data, batch, sampler=sampler, drop_last=drop_last, **options)


def tracked(loader: DataLoader, **options) -> TrackedLoader:
    return TrackedLoader(loader, name="train", **options)


def ids(batches) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]


def marked_after(loader: DataLoader, batches: int, more: int = 0) -> dict:
    """The state of a loader whose window began after some batches, some more into the window."""
    one = tracked(loader)
    running = iter(one)
    for _ in range(batches):
        next(running)
    one.record_window_start()
    for _ in range(more):
        next(running)
    return one.state()


def elsewhere(state: dict, loader: DataLoader, **options) -> TrackedLoader:
    one = tracked(loader, **options)
    one.load_in_other_world(state)
    return one


def test_what_is_left_of_the_epoch_is_dealt_over_the_new_ranks():
    """2 ranks took 3 batches of 2: 11 of 23 are left for 3 ranks, and one is trained again."""
    order = ids(dealt(1))
    state = marked_after(dealt(2), 3, more=2)
    ranks = [elsewhere(state, dealt(3, rank)) for rank in range(3)]
    rest = [*order[12:], order[0]]
    assert [ids(rank) for rank in ranks] == [rest[0::3], rest[1::3], rest[2::3]]
    assert [rank.padding for rank in ranks] == [1] * 3
    assert ranks[0].state()["padding"] == 1
    assert ids(ranks[1]) == ids(dealt(3, 1))
    assert ranks[0].passes_started == 1
    assert ranks[1].passes_started == 2


def test_any_old_rank_says_the_same():
    """Also one whose own samples were others."""
    states = [marked_after(dealt(2, rank), 3, more=rank) for rank in range(2)]
    assert states[0]["window"] == states[1]["window"]


def test_who_drops_the_last_trains_no_sample_twice():
    """Of 11 left, 3 ranks with batches of 2 train 6."""
    state = marked_after(dealt(2, drop_last=True), 3)
    ranks = [elsewhere(state, dealt(3, rank, drop_last=True)) for rank in range(3)]
    assert sorted(sample for rank in ranks for sample in ids(rank)) == sorted(ids(dealt(1))[12:18])
    assert ranks[0].padding == 0


@pytest.mark.parametrize("drop_last", [False, True], ids=["", "drop_last"])
def test_an_equal_data_world_goes_back_to_the_very_same_batches(drop_last):
    """Only the parallel layout changed, or tensor-parallel peers came: same rank, same data."""
    loader = dealt(2, 1, batch=5, drop_last=drop_last)
    want = [batch.tolist() for batch in loader][1:]
    state = marked_after(dealt(2, 0, batch=5, drop_last=drop_last), 1, more=1)
    for _peer in range(2):
        again = elsewhere(state, dealt(2, 1, batch=5, drop_last=drop_last))
        assert [batch.tolist() for batch in again] == want


def test_positions_are_those_of_the_window():
    """The batches of the old world count on; what is left is counted in the new one."""
    state = marked_after(dealt(2), 3, more=2)
    one = elsewhere(state, dealt(3))
    assert (one.batches, one.samples, one.in_pass, one.passes_started) == (3, 6, True, 1)
    assert len(one) == 4
    running = iter(one)
    next(running)
    assert (one.batches, one.samples, one.total_batches, one.total_samples) == (4, 8, 1, 2)
    assert len(list(running)) == 1
    assert one.exhausted


def test_a_window_may_have_begun_in_the_epoch_before():
    """The snapshot is 1 batch into epoch 1; the window began 2 batches before the end of 0."""
    one = tracked(dealt(2))
    running = iter(one)
    for _ in range(4):
        next(running)
    one.record_window_start()
    assert len(list(running)) == 2
    one.sampler.set_epoch(1)
    next(iter(one))
    state = one.state()
    again = dealt(1)
    other = elsewhere(state, again)
    again.sampler.set_epoch(0)
    assert ids(other) == ids(dealt(1))[16:]
    again.sampler.set_epoch(1)
    second = dealt(1)
    second.sampler.set_epoch(1)
    assert ids(other) == ids(second)


def test_the_order_is_the_windows_whatever_epoch_the_sampler_was_told():
    """The script's seed and epoch give way to the saved ones, as in an exact resume."""
    loader = dealt(2)
    loader.sampler.set_epoch(5)
    state = marked_after(loader, 3)
    again = dealt(1)
    other = elsewhere(state, again)
    assert again.sampler.epoch == 5
    again.sampler.set_epoch(6)
    want = dealt(1)
    want.sampler.set_epoch(5)
    assert ids(other) == ids(want)[12:]


def test_a_window_that_began_between_passes_goes_on_with_a_plain_pass():
    """With its evaluation still to come, the owner lets the finished pass end at once."""
    one = tracked(dealt(2))
    ids(one)
    one.record_window_start()
    for state in (one.state(), (next(iter(one)), one.state())[1]):
        again = elsewhere(state, dealt(3))
        assert (again.in_pass, again.exhausted, again.batches) == (False, True, 6)
        again.skip_passes(1)
        assert ids(again) == []
        assert ids(again) == ids(dealt(3))


def test_a_window_that_began_when_all_was_trained_leaves_nothing():
    """The end of the pass had not been seen; its padding stays on record."""
    state = marked_after(dealt(2), 6)
    one = elsewhere(state, dealt(3))
    assert ids(one) == []
    assert (one.exhausted, one.batches, one.padding) == (True, 6, 1)


def test_worlds_can_change_again_and_again_in_one_epoch():
    """1, 2, 4 and 3 ranks, each with other batches."""
    order, trained = ids(dealt(1)), 0
    state = marked_after(dealt(1), 1)
    trained = 2
    for ranks, batch in ((2, 3), (4, 1)):
        one = elsewhere(state, dealt(ranks, ranks - 1, batch=batch))
        running = iter(one)
        next(running)
        one.record_window_start()
        state = one.state()
        trained += ranks * batch
    left = [ids(elsewhere(state, dealt(3, rank))) for rank in range(3)]
    assert trained == 12
    assert left == [[*order[12:], order[0]][rank::3] for rank in range(3)]


def test_a_state_between_loading_and_the_first_batch_can_be_loaded_anywhere():
    """Nothing was trained yet: it is the old window's start still, marked again or not."""
    old = marked_after(dealt(2), 3, more=1)
    one = elsewhere(old, dealt(3))
    one.record_window_start()
    state = one.state()
    same = tracked(dealt(3))
    same.load_state(state)
    assert ids(same) == ids(one)
    assert ids(elsewhere(state, dealt(1))) == ids(dealt(1))[12:]


def test_an_older_state_without_a_window_still_loads():
    """It can go on in its own world only, and says so."""
    state = marked_after(dealt(2), 3)
    for key in ("window", "deal", "elsewhere", "padding"):
        del state[key]
    one = tracked(dealt(2))
    one.load_state(state)
    assert one.state()["window"] is None
    assert ids(one) == ids(dealt(2))[6:]
    assert "does not say where its window began" in one.differences_in_other_world(state)[0]
    with pytest.raises(StateMismatch, match="another number of ranks"):
        one.load_in_other_world(state)


def test_a_mark_outlives_an_exact_resume():
    """Stopped inside the window, resumed, and stopped again before its end."""
    state = marked_after(dealt(2), 3, more=1)
    one = tracked(dealt(2))
    one.load_state(state)
    next(iter(one))
    assert one.state()["window"] == state["window"]
    one.load_state(state)
    one.record_window_start()
    assert one.state()["window"] == marked_after(dealt(2), 4)["window"]


def test_the_owner_restores_its_randomness_once():
    """Before the iterator is made: its workers are seeded as in a new pass."""
    calls = []
    one = elsewhere(
        marked_after(dealt(2), 3), dealt(3), before_first_fetch=lambda: calls.append(one.in_pass)
    )
    torch.manual_seed(3)
    assert ids(one)
    assert ids(one)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    ids(dealt(3)), ids(dealt(3))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert calls == [True]


KINDS = {"no workers": (0, False), "2": (2, False), "2 kept": (2, True)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_dealt_elsewhere_can_be_stopped_and_goes_on_bitwise(kind):
    """At any boundary of it, at its end, and in the next pass, which reuses workers."""
    workers, kept = KINDS[kind]
    options = {"num_workers": workers, "persistent_workers": kept, "data": d.Augmented()}
    options["multiprocessing_context"] = "fork" if workers else None
    state = marked_after(dealt(2), 3, more=2)

    def run(stop: int | None) -> d.Run:
        d.seed_all(7)
        one = d.Run(dealt(3, 1, generator=torch.Generator().manual_seed(2), **options), stop=stop)
        one.loader.load_in_other_world(state)
        if stop is None:
            one.train(epochs=2)
            one.loader.shutdown()
            return one
        with pytest.raises(d.StoppedError):
            one.train(epochs=2)
        one.loader.shutdown()
        return one

    want = run(None).rows
    assert len(want) == 2 + 4
    for stop in (1, 2, 3, 4, 6) if not workers else (2, 3, 6):
        first = run(stop)
        d.seed_all(999)
        second = d.Run(dealt(3, 1, generator=torch.Generator(), **options)).load(first.saved)
        assert first.rows + second.train(epochs=2) == want, f"stopped at boundary {stop}"
        second.loader.shutdown()


class ToldTwice(DistributedSampler):
    """Deals as torch does; the epoch counts double."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(2 * epoch)


class Reversed(DistributedSampler):
    """Has an order of its own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def forms(ranks: int) -> dict[str, DataLoader]:
    data = d.Plain()
    sampler = DistributedSampler(data, ranks, 0, seed=4)
    batches = BatchSampler(sampler, 2, False)
    return {
        "batch sampler": DataLoader(data, batch_sampler=batches),
        "whole lists": DataLoader(Lists(), batch_size=None, sampler=batches),
        "subclass": DataLoader(data, 2, sampler=ToldTwice(data, ranks, 0, seed=4)),
    }


class Lists(d.Plain):
    """Is asked for whole batches."""

    def __getitem__(self, index: list[int]):
        return torch.tensor(index)


@pytest.mark.parametrize("form", forms(1))
def test_however_the_sampler_gets_into_the_loader(form):
    """And its epoch is known."""
    loader = forms(2)[form]
    set_epoch(loader, 3)
    state = marked_after(loader, 3)
    want = dealt(1)
    want.sampler.set_epoch(6 if form == "subclass" else 3)
    one = elsewhere(state, forms(1)[form])
    assert ids(one) == ids(want)[12:]
    again = tracked(forms(2)[form])
    again.load_state(state)
    set_epoch(loader, 3)
    assert ids(again) == ids(loader)[6:]


def test_single_samples_are_dealt_too():
    """batch_size=None: a batch is one sample."""
    loader = dealt(2, batch=None)
    one = elsewhere(marked_after(loader, 3), dealt(1))
    assert ids(one) == ids(dealt(1))[6:]


def test_data_read_in_order_goes_from_one_process_to_several_and_back():
    """SequentialSampler is DistributedSampler(shuffle=False) of a single rank."""
    plain = DataLoader(d.Plain(), 2)
    assert isinstance(plain.sampler, SequentialSampler)
    one = elsewhere(marked_after(plain, 3), dealt(3, 2, shuffle=False))
    assert ids(one) == [*range(6, 23), 0][2::3]
    back = elsewhere(marked_after(dealt(3, shuffle=False), 2), plain)
    assert ids(back) == list(range(12, 23))


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("own", [False, True], ids=["", "generator"])
def test_one_process_that_shuffles_goes_back_to_the_same_order(own, kept):
    """RandomSampler, in the 1st and 2nd epoch, inside a pass and before it."""

    def make(seed: int) -> TrackedLoader:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own else None
        workers = {"num_workers": 1, "multiprocessing_context": "fork"} if kept else {}
        return tracked(
            DataLoader(d.Plain(), 2, True, generator=generator, persistent_workers=kept, **workers)
        )

    one = make(1)
    whole = [ids(one) for _ in range(3)]
    one.shutdown()
    for epoch in range(2):
        for batches in (0, 3):
            one = make(1)
            for _ in range(epoch):
                ids(one)
            running = iter(one)
            for _ in range(batches):
                next(running)
            one.record_window_start()
            next(running)
            state = one.state()
            one.shutdown()
            again = make(2)
            again.load_in_other_world(state)
            assert ids(again) == whole[epoch][2 * batches :]
            if own:
                assert ids(again) == whole[epoch + 1]
            again.shutdown()


def test_what_cannot_be_dealt_elsewhere_is_named_with_what_to_use_instead():
    """Own orders, streams, loaders with a state of their own; other data."""
    good = marked_after(dealt(2), 3)
    random = DataLoader(d.Plain(), 2, shuffle=True)
    assert isinstance(random.sampler, RandomSampler)
    cannot = {
        "Reversed": DataLoader(d.Plain(), sampler=Reversed(d.Plain(), 2, 0)),
        "OwnSampler": DataLoader(d.Plain(), sampler=d.OwnSampler()),
        "Stream": DataLoader(d.Stream()),
        "Countdown": d.Countdown(),
        "drawn by RandomSampler": random,
        "in order": dealt(2, shuffle=False),
        "had 23 samples, has 9": dealt(2, data=range(9)),
    }
    for words, loader in cannot.items():
        one = tracked(loader)
        one.record_window_start()
        (sentence,) = one.differences_in_other_world(good)
        assert sentence.startswith("train: ")
        assert words in sentence
        if "had" not in words:
            assert "DistributedSampler, also with one process" in sentence
        with pytest.raises(StateMismatch):
            one.load_in_other_world(good)
        (sentence,) = tracked(dealt(2)).differences_in_other_world(one.state())
        assert sentence.startswith("train: ")


def test_samplers_that_know_nothing_of_ranks_are_named_in_several_processes():
    """Each process would read everything, or have its own order."""
    shuffled = DataLoader(d.Plain(), 2, shuffle=True)
    plain = DataLoader(d.Plain(), 2)

    def found(old, new, processes):
        return tracked(new).differences_in_other_world(marked_after(old, 1), processes)

    assert found(shuffled, shuffled, (1, 1)) == []
    assert "each has its own order" in found(shuffled, shuffled, (1, 2))[0]
    assert "each has its own order" in found(shuffled, shuffled, (2, 2))[0]
    assert found(plain, plain, (2, 2)) == []
    assert "each of 2 processes reads all" in found(plain, plain, (1, 2))[0]
    assert "each of 4 processes reads all" in found(plain, dealt(2, shuffle=False), (4, 2))[0]
    assert found(plain, dealt(2, shuffle=False), (1, 2)) == []
    assert found(dealt(4), dealt(2), (4, 2)) == []


def test_a_loader_that_rests_goes_on_with_any_number_of_ranks():
    """An evaluation's, which each process reads whole: none of its batches is to be dealt."""
    one = tracked(DataLoader(d.Plain(), 2))
    ids(one)
    one.record_window_start()
    for other in (DataLoader(d.Plain(), 2), dealt(3, shuffle=False)):
        assert tracked(other).differences_in_other_world(one.state(), (2, 3)) == []
        assert len(ids(elsewhere(one.state(), other))) > 0


def test_a_pass_that_a_break_has_left_is_no_window_s_place():
    """Of a loader without boundaries of its own: the next pass begins at its beginning."""
    one = tracked(dealt(2))
    for _ in one:
        break
    one.record_window_start()
    assert one.state()["window"]["in_pass"] is False
