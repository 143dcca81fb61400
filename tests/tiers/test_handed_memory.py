"""Memory that another process fills while it is offered, and at no other time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import fresh_memory, handed_memory, userfault
from trainckpt.tiers.direct import PAGE_BYTES, address, memory
from trainckpt.tiers.handed_memory import Filler, Offered, ends
from trainckpt.tiers.large_pages import LargePages

SIZE = 3_000_000


def can_borrow():
    try:
        with userfault.filling():
            userfault.give_back(userfault.borrow(os.getpid(), userfault.descriptor() or 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not can_borrow(), reason="this system makes no pages with content, or lets nobody do it"
)


@pytest.fixture(autouse=True)
def pages(tmp_path, monkeypatch):
    """This system has small pages alone, whatever it has."""
    found = LargePages(tmp_path)
    monkeypatch.setattr(fresh_memory, "large_pages", lambda: found)
    monkeypatch.setattr(handed_memory, "_is_one_node", lambda: True)


@pytest.fixture
def data():
    return memoryview(bytearray(random.Random(7).randbytes(SIZE)))


@pytest.fixture
def offered():
    found = Offered()
    yield found
    found.close()


def filler(offered):
    """What another process would have; this one may be that as well."""
    return Filler(os.getpid(), offered.descriptor)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


OTHER = f"""
import os, sys
from trainckpt.tiers import fresh_memory, handed_memory
from trainckpt.tiers.direct import address, memory
from trainckpt.tiers.handed_memory import Offered
from trainckpt.tiers.large_pages import LargePages
from pathlib import Path
none = LargePages(Path("/nowhere"))
fresh_memory.large_pages = lambda: none
handed_memory._is_one_node = lambda: True
room, offered = memory({SIZE}, 1000), Offered()
assert offered.offer(room)
print(os.getpid(), offered.descriptor, address(room), flush=True)
sys.stdin.readline()
print(offered.take_back(room))
offered.close()
room[0] = room[-1] = 1
sys.stdout.flush()
sys.stdout.buffer.write(room)
"""


def test_another_process_gets_what_it_offers_memory_for(data):
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        process, descriptor, where = map(int, other.stdout.readline().split())
        one = Filler(process, descriptor)
        assert one.fill(where, data)
        other.stdin.write(b"\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"True\n"
        found = other.stdout.read()
        one.close()
    (first, begin), (end, last) = ends(where, SIZE)
    assert (first, last) == (0, SIZE)
    assert found[begin:end] == data[begin:end]
    assert found[1:begin] + found[end:-1] == bytes(begin - 1 + last - end - 1), "left to its owner"
    assert not one.fill(where, data)


def test_it_is_filled_where_it_was_offered_and_as_long_as_it_is(offered, data):
    room, elsewhere = memory(SIZE), memory(SIZE)
    one = filler(offered)
    assert offered.offer(room[: SIZE // 2])
    assert one.fill(address(room), data[: SIZE // 2])
    assert not one.fill(address(elsewhere), data)
    assert not one.fill(address(room) + SIZE // 2, data[SIZE // 2 :])
    assert offered.take_back(room[: SIZE // 2])
    assert not one.fill(address(room), data)
    whole = SIZE // 2 // PAGE_BYTES * PAGE_BYTES
    assert room[:whole] == data[:whole]
    assert bytes(room[whole:]) == bytes(SIZE - whole)
    assert bytes(elsewhere) == bytes(SIZE)
    one.close()


def test_what_nobody_has_filled_is_like_any_other_memory_once_it_was_taken_back(offered):
    room = memory(SIZE)
    assert offered.offer(room)
    assert not offered.take_back(room)
    assert not offered.take_back(room)
    assert bytes(room) == bytes(SIZE)
    room[SIZE // 2] = 5


def test_what_was_filled_in_part_is_not_there(offered, data):
    room = memory(SIZE)
    assert offered.offer(room)
    one = filler(offered)
    assert one.fill(address(room), data[: SIZE // 2])
    assert not offered.take_back(room)
    one.close()


def test_all_that_is_offered_is_taken_back_at_once_and_it_is_known_what_was_filled(data):
    offered, rooms = Offered(), [memory(SIZE), memory(SIZE)]
    assert all(map(offered.offer, rooms))
    one = filler(offered)
    one.fill(address(rooms[1]), data)
    offered.close()
    assert not one.fill(address(rooms[0]), data)
    rooms[0][5] = rooms[1][5] = 7
    assert [offered.take_back(room) for room in rooms] == [False, True]
    one.close()


def test_memory_that_was_touched_or_is_small_is_not_offered(offered):
    touched = memory(SIZE)
    touched[0] = 1
    assert not offered.offer(touched)
    assert not offered.offer(memory(PAGE_BYTES))
    assert not offered.take_back(touched)


def test_a_descriptor_that_is_another_one_by_now_is_let_go(offered):
    before = descriptors()
    with Path(os.devnull).open() as other, pytest.raises(OSError, match="is another one"):
        Filler(os.getpid(), other.fileno())
    with pytest.raises(OSError, match="descriptor 999999"):
        Filler(os.getpid(), 999999)
    with pytest.raises(OSError, match="No such process"):
        Filler(2**22 - 1, 3)
    assert descriptors() == before


def test_a_forked_process_keeps_none_that_was_borrowed(offered):
    before = descriptors()
    one = filler(offered)
    child = os.fork()
    if not child:
        os._exit(0 if descriptors() == before - 1 else 3)  # nor this process's own
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.close()
    one.close()
    assert descriptors() == before


def test_memory_that_the_system_keeps_stays_allocated_and_the_rest_is_taken_back(monkeypatch, data):
    """Whoever has borrowed the descriptor keeps the charge, whatever this process closes."""
    offered, rooms = Offered(), [memory(SIZE, n) for n in range(4)]
    assert all(map(offered.offer, rooms))
    one = filler(offered)
    discharge, kept = userfault.discharge, [address(rooms[0]), address(rooms[2])]

    def refused(descriptor, where, num_bytes):
        is_kept = any(first <= where < first + SIZE for first in kept)
        return not is_kept and discharge(descriptor, where, num_bytes)

    monkeypatch.setattr(userfault, "discharge", refused)
    monkeypatch.setattr(handed_memory, "_lost", lost := [])
    with pytest.raises(UnusableSnapshot, match="cannot be filled"):
        offered.take_back(rooms[0])
    with pytest.raises(UnusableSnapshot, match="cannot be filled"):
        offered.close()
    assert [address(block) for block in lost] == kept
    rooms[1][5] = rooms[3][5] = 1
    one.close()
    rooms[0][5] = rooms[2][5] = 1  # with the last descriptor, the charge has ended


def test_what_one_taker_could_not_have_back_is_an_error_for_who_ends_it_too(monkeypatch):
    """The first may have gone on to something else: nobody shall read to that memory."""
    offered, rooms = Offered(), [memory(SIZE), memory(SIZE)]
    assert all(map(offered.offer, rooms))
    monkeypatch.setattr(handed_memory, "_lost", [])
    with monkeypatch.context() as patch:
        patch.setattr(userfault, "discharge", lambda *_: False)
        with pytest.raises(UnusableSnapshot, match="cannot be filled"):
            offered.take_back(rooms[0])
    with pytest.raises(UnusableSnapshot, match="cannot be filled"):
        offered.close()
    rooms[0][5] = rooms[1][5] = 1  # with the service, its charge has ended


def test_nothing_is_offered_where_there_are_several_memory_nodes(offered, monkeypatch, tmp_path):
    monkeypatch.undo()
    for text, is_one in (("0\n", True), ("0-1\n", False), ("0,4\n", False)):
        (tmp_path / "online").write_text(text)
        monkeypatch.setattr(handed_memory, "NODES", tmp_path / "online")
        handed_memory._is_one_node.cache_clear()
        assert handed_memory._is_one_node() == is_one
        if not is_one:
            assert not offered.offer(memory(SIZE))
    handed_memory._is_one_node.cache_clear()


def test_where_the_system_refuses_nothing_is_offered(monkeypatch):
    monkeypatch.setattr(userfault, "_CALLS", {})
    userfault.is_available.cache_clear()
    offered = Offered()
    assert not offered.offer(memory(SIZE))
    assert offered.descriptor is None
    offered.close()
    monkeypatch.undo()
    userfault.is_available.cache_clear()
