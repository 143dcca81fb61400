"""What a rank reads it fills into the memory of those that asked; they believe none of it."""

from __future__ import annotations

import os

import pytest

from tests.snapshot.test_board import Reading
from tests.snapshot.test_shares import equal, saved
from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot.board import OtherBoard, name_of
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import fresh_memory, userfault
from trainckpt.tiers.direct import memory
from trainckpt.tiers.handed_memory import Filler
from trainckpt.tiers.large_pages import LargePages
from trainckpt.tiers.local import LocalTier

pytestmark = pytest.mark.skipif(
    not userfault.is_available() or not hasattr(os, "pidfd_open"),
    reason="this system makes no pages with content, or lets nobody borrow descriptors",
)


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Makes the tensors of a snapshot, and two ranks that read it; what they have begun ends."""
    pages = LargePages(tmp_path / "none")
    monkeypatch.setattr(fresh_memory, "large_pages", lambda: pages)
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    with userfault.filling():
        host = Reading(tier, manifest)
        yield tensors, host
        for reader in host.readers:
            reader.share.end()


@pytest.fixture
def completed(monkeypatch):
    """Loads of which the whole pages had come when they were taken."""
    found = []
    complete = Taker._complete

    def counted(self, load, place):
        complete(self, load, place)
        found.append(load)

    monkeypatch.setattr(Taker, "_complete", counted)
    return found


def asked(board):
    """Names of what a rank has asked for: what goes to large memory that nobody has touched."""
    found = OtherBoard(board.place).asked()
    assert found.where
    return set(found.where)


def finish(host):
    """Bytes that each rank had to read after all."""
    told = [reader.share.told() for reader in host.readers]
    return [reader.take(told) for reader in host.readers]


def test_what_is_read_after_another_has_asked_is_filled_in_there(two, completed):
    tensors, host = two
    left = list(host.read(1)._left)  # it asks, and waits
    host.read(0)
    assert {id(load) for load in host.early(1)} == {id(load) for load in left}
    assert set(map(name_of, completed)) == asked(host.boards[1])
    assert sum(len(load.into) for load in completed) > 500_000
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


def test_what_was_filled_in_and_not_taken_early_is_taken_at_the_end(two, completed):
    tensors, host = two
    share = host.read(1)
    taking = share._copying
    taking._wanted = {}  # its thread ends
    taking._thread.join()
    host.read(0)
    assert finish(host) == [0, 0]
    assert not taking._taken
    assert set(map(name_of, completed)) == asked(host.boards[1])
    assert all(equal(host.tensors(number), tensors) for number in range(2))


@pytest.mark.parametrize("how", ["other bytes", "half of it", "nothing"])
def test_what_is_filled_in_wrongly_is_copied(two, monkeypatch, how):
    tensors, host = two
    fill = Filler.fill

    def wrong(self, where, data):
        if how == "nothing":
            return False
        bad = memoryview(bytearray(data))
        bad[len(data) // 2] ^= 1
        return fill(self, where, bad if how == "other bytes" else data[: len(data) // 2])

    monkeypatch.setattr(Filler, "fill", wrong)
    host.read(1)
    host.read(0)
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


def test_memory_that_cannot_be_had_back_is_an_error_and_touched_by_nobody(two, monkeypatch):
    _, host = two
    host.read(1)
    host.read(0)
    with monkeypatch.context() as patch:
        patch.setattr(userfault, "discharge", lambda *_: False)
        told = [reader.share.told() for reader in host.readers]
        host.readers[1].share._copying._offered.offer(memory(1 << 20))
        with pytest.raises(UnusableSnapshot, match="cannot be filled"):
            host.readers[1].take(told)


def test_who_cannot_fill_in_says_that_it_is_there_all_the_same(two, monkeypatch, completed):
    tensors, host = two

    def refused(*_):
        raise OSError("as where processes may not debug each other")

    monkeypatch.setattr(userfault, "borrow", refused)
    left = list(host.read(1)._left)
    host.read(0)
    assert {id(load) for load in host.early(1)} == {id(load) for load in left}
    assert completed == []
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))
