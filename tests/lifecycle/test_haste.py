"""A proof of what was copied beside training waits for a step, unless training waits for it."""

from __future__ import annotations

from functools import partial

import pytest

from tests.lifecycle import waiting
from tests.lifecycle.training import usable
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import NoAgreement
from trainckpt.lifecycle.saving.haste import Haste
from trainckpt.ranks.channel import Alone
from trainckpt.ranks.world import World

preload("tests.lifecycle.waiting")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_trains_on_when_its_file_is_written_as_others_prove_their_copies(
    tmp_path, rank
):
    program = partial(waiting.save_at_each_step, streams=rank, waits=None)
    results = run_ranks(program, 2, str(tmp_path / "run"))
    assert [errors for errors, _, _ in results] == [[], []]
    assert [left for _, _, left in results] == [[], []]
    assert results[rank][1] == 0
    assert results[1 - rank][1] >= 2
    assert len(usable(tmp_path / "run")) == waiting.SAVES + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_training_waits_for_a_save_is_not_waited_for_by_the_others_proofs(
    tmp_path, rank
):
    program = partial(waiting.save_at_each_step, streams=None, waits=rank)
    results = run_ranks(program, 2, str(tmp_path / "run"))
    assert [errors for errors, _, _ in results] == [[], []]
    assert all(proved >= 2 for _, proved, _ in results)
    assert results[rank][2] == [waiting.SAVES], "forgotten when the next is begun"
    assert len(usable(tmp_path / "run")) == waiting.SAVES + 1


class Store(Alone):
    """Of two ranks; knows how often it was written to, and may be gone."""

    is_gone, puts = False, 0

    def put(self, key, value):
        self.puts += 1
        if self.is_gone:
            raise NoAgreement("gone")
        super().put(key, value)

    def peek(self, key):
        if self.is_gone:
            raise NoAgreement("gone")
        return super().peek(key)

    def forget(self, keys):
        if self.is_gone:
            raise NoAgreement("gone")
        super().forget(keys)


def two_ranks():
    store = Store(World(0, 2, 0, "here"))
    return store, Haste(store, store)


def test_haste_is_told_once_a_save_and_forgotten_after_it():
    store, haste = two_ranks()
    assert not haste.is_asked(3)
    haste.ask(3)
    haste.ask(3)
    assert store.puts == 1
    assert [haste.is_asked(number) for number in (2, 3, 4)] == [False, True, False]
    haste.is_over()
    assert not haste.is_asked(3)
    assert not store._values


def test_without_the_store_nobody_hurries_and_nothing_fails():
    store, haste = two_ranks()
    store.is_gone = True
    haste.ask(3)
    assert not haste.is_asked(3)
    haste.is_over()


def test_one_rank_alone_asks_nobody():
    store = Store(World(0, 1, 0, "here"))
    haste = Haste(store, store)
    haste.ask(3)
    assert store.puts == 0
    assert not haste.is_asked(3)
