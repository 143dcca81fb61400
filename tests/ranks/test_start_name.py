"""One name for a start of the ranks, whatever the store holds of starts before it."""

from __future__ import annotations

import re
import threading

import pytest
from torch.distributed import HashStore

from trainckpt.errors import NoAgreement
from trainckpt.ranks import world
from trainckpt.ranks.store import RankStore
from trainckpt.ranks.world import World, agree_on_name


@pytest.fixture
def store(monkeypatch):
    """One store that every start shares, as that of a torchrun agent."""
    found = HashStore()
    monkeypatch.setattr(world, "connect", lambda world, name: RankStore(world, found, f"{name}/"))
    return found


def start(size, within_s=20.0, late=()):
    """All ranks but the late ones; what each says."""
    said = {}

    def run(rank):
        try:
            said[rank] = agree_on_name(World(rank, size, rank, "here"), within_s)
        except NoAgreement as error:
            said[rank] = error.message

    threads = [threading.Thread(target=run, args=[r]) for r in range(size) if r not in late]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return said


def test_all_ranks_get_one_name_and_each_start_another(store):
    names = [set(start(size).values()) for size in (3, 1, 2, 3)]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == 4
    assert store.num_keys() == 0


def test_what_a_start_that_was_killed_has_left_is_no_answer_to_the_next(store):
    for late in ([0], [1], [0, 2]):  # with greetings left, and answers that nobody took
        start(3, within_s=0.05, late=late)
    assert len(set(start(3).values())) == 1
    start(2, within_s=0.05, late=[0])
    assert len(set(start(2).values())) == 1


def test_a_rank_that_does_not_come_is_named_in_time(store):
    said = start(3, within_s=0.05, late=[2])
    assert said[0] == "rank 0 waited 0.05 s for rank 2 to begin the attempt"
    assert re.fullmatch("[0-9a-f]{16}", said[1])
    said = start(2, within_s=0.05, late=[0])
    assert said[1] == "rank 1 waited 0.05 s for rank 0 to begin the attempt"
