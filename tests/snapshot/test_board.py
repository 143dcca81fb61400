"""While ranks of a host read, each takes what others say is there; and believes none of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.snapshot.test_shares import Host, equal, saved
from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot import board as boards
from trainckpt.snapshot.blocks import Found, Load
from trainckpt.snapshot.board import Board
from trainckpt.snapshot.copying import Copying
from trainckpt.tiers import other_memory
from trainckpt.tiers.local import LocalTier

WAIT_S = 20.0


class Reading(Host):
    """Two ranks with boards: the first has read its share before the second begins."""

    def __init__(self, tier, manifest, common=False):
        super().__init__(tier, manifest, 2, common=common)
        self.boards = [Board(), Board()]
        for number, reader in enumerate(self.readers):
            reader.share._board = self.boards[number]
            reader.share._boards = [self.boards[1 - number].place]

    def read(self, number):
        self.readers[number].read(self.wanted, self.destinations[number], donor=0)
        return self.readers[number].share

    def early(self, number):
        """What a rank takes before it is asked to."""
        copying = self.readers[number].share._copying
        copying._thread.join(WAIT_S)
        assert not copying._thread.is_alive()
        return copying._taken


@pytest.fixture
def two(tmp_path):
    """Makes the tensors of a snapshot, and two ranks that read it; what they have begun ends."""
    hosts = []

    def begun(*, common=False):
        tier = LocalTier(tmp_path)
        tensors, manifest = saved(tier, 2)
        hosts.append(Reading(tier, manifest, common))
        return tensors, hosts[-1]

    yield begun
    for reader in (reader for host in hosts for reader in host.readers):
        reader.share.end()


@pytest.mark.parametrize("common", [False, True])
def test_what_another_has_read_is_taken_before_it_is_asked_for(two, common):
    tensors, host = two(common=common)
    host.read(0)
    share = host.read(1)
    left = [*share._left, *share._in_common]
    assert bool(share._in_common) == common
    assert {id(load) for load in host.early(1)} == {id(load) for load in left}
    assert sum(len(load.into) for load in left) > 500_000
    told = [reader.share.told() for reader in host.readers]
    nowhere = told[0]._replace(address=PAGE)
    assert host.readers[1].take([nowhere]) == 0
    assert host.readers[0].take(told) == 0  # of what came while it took nothing early
    assert all(equal(host.tensors(number), tensors) for number in range(2))


PAGE = 4096  # an address where nothing is


@pytest.mark.parametrize("agreed", [True, False])
def test_what_was_verified_early_is_once_more_unless_nobody_can_have_written_there(two, agreed):
    _, host = two(common=True)
    host.read(0)
    share = host.read(1)
    assert {*map(id, share._in_common)} <= {*map(id, host.early(1))}
    share._in_common[0].into[5] ^= 1
    told = [reader.share.told() for reader in host.readers]
    if agreed:
        assert host.readers[1].take(told, agreed=True) == 0
    else:
        with pytest.raises(UnusableSnapshot, match="does not match its digest"):
            host.readers[1].take(told, agreed=False)


def test_what_is_bad_in_the_memory_of_all_is_found_although_its_board_says_it_is_there(two):
    _, host = two(common=True)
    bad = host.read(0)._own_in_common[0]
    bad.into[5] ^= 1
    share = host.read(1)
    assert len(host.early(1)) == len(share._left) + len(share._in_common) - 1
    told = [reader.share.told() for reader in host.readers]
    with pytest.raises(UnusableSnapshot, match="does not match its digest"):
        host.readers[1].take(told, agreed=True)


def test_what_is_not_as_it_should_be_is_taken_by_nobody(two):
    tensors, host = two()
    bad = host.read(0)._own[0]
    bad.into[5] ^= 1
    left = host.read(1)._left
    early = host.early(1)
    told = host.readers[0].share.told()
    assert len(early) == len(left) - 1
    assert host.readers[1].take([told]) == len(bad.into)  # read from the disk
    assert equal(host.tensors(1), tensors)


def test_of_two_that_want_the_same_bytes_each_gets_them(two):
    """Only one is taken early: the other is not taken for it."""
    tensors, host = two()
    host.read(0)
    share = host.read(1)
    assert host.early(1)
    first = share._left[0]
    twin = first._replace(into=memoryview(bytearray(len(first.into))))
    share._left.append(twin)
    assert host.readers[1].take([host.readers[0].share.told()]) == 0
    assert twin.into == first.into
    assert equal(host.tensors(1), tensors)


def test_a_board_that_is_full_says_no_more(two, monkeypatch):
    monkeypatch.setattr(boards, "NUM_ENTRIES", 2)
    tensors, host = two()
    host.read(0)
    left = host.read(1)._left
    assert len(left) > 2
    told = [reader.share.told() for reader in host.readers]
    assert host.readers[1].take(told) == 0
    assert len(host.readers[1].share._copying._taken) <= 2
    assert equal(host.tensors(1), tensors)


def load(number, num_bytes=1000):
    """One that nothing was ever read for."""
    return Load(Found(f"file{number}", 0, None), 0, num_bytes, memoryview(bytearray(num_bytes)))


def test_a_board_of_a_process_that_is_gone_says_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    copying = Copying([load(1)], [other_memory.Place(child.pid, PAGE, 16 * 8)])
    assert copying.end() == []


def test_it_ends_although_nobody_says_anything():
    board = Board()
    copying = Copying([load(1), load(2)], [board.place])
    assert copying._thread.is_alive()
    assert copying.end() == []
    assert not copying._thread.is_alive()


def test_what_is_said_in_many_looks_is_found_to_the_last(monkeypatch):
    monkeypatch.setattr(boards.OtherBoard, "_AT_ONCE", 3)
    board, loads = Board(), [load(number) for number in range(10)]
    other = boards.OtherBoard(board.place)
    found = []
    for each in loads:
        board.say(each)
    while news := other.news():
        assert len(news) <= 3
        found += news
    assert [name for name, _ in found] == [boards.name_of(each) for each in loads]
    board.say(load(11))
    assert [name for name, _ in other.news()] == [boards.name_of(load(11))]
