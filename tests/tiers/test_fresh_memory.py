"""Fresh memory: filled as its pages are made, and like any other memory before and after."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import fresh_memory, userfault
from trainckpt.tiers.direct import PAGE_BYTES, address, copy, libc, memory
from trainckpt.tiers.fresh_memory import FROM_BYTES, fill, is_fresh
from trainckpt.tiers.large_pages import LargePages
from trainckpt.tiers.userfault import filling

SIZE = 300_000
made_here = pytest.mark.skipif(
    not userfault.is_available(), reason="this system makes no pages with content"
)


def content(num_bytes=SIZE, seed=5):
    return memoryview(bytearray(random.Random(seed).randbytes(num_bytes)))


def resident(block):
    """Which pages of a block that begins at one are there."""
    found = (ctypes.c_ubyte * (-(-len(block) // PAGE_BYTES)))()
    where, size = ctypes.c_void_p(address(block)), ctypes.c_size_t(len(block))
    assert libc().mincore(where, size, found) == 0
    return [bool(page & 1) for page in found]


def services():
    """How many of them this process has open."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "userfaultfd" in os.readlink(path)  # noqa: PTH115 - text, not a path
    return found


@pytest.fixture(autouse=True)
def pages(tmp_path, monkeypatch):
    """This system has small pages alone, whatever it has."""
    found = LargePages(tmp_path)
    monkeypatch.setattr(fresh_memory, "large_pages", lambda: found)
    return found


@pytest.fixture
def made(monkeypatch):
    """Bytes of the pages that were made with content."""
    found = []

    def counted(*arguments):
        found.append(make(*arguments))
        return found[-1]

    make = fresh_memory._make
    monkeypatch.setattr(fresh_memory, "_make", counted)
    return found


@made_here
@pytest.mark.parametrize("first", [0, 1, 64, 4095])
@pytest.mark.parametrize("more", [0, 1, 4000])
def test_pages_are_made_with_what_is_copied_to_them(made, first, more):
    room = memory(1 << 20)
    data = content(SIZE + more)
    into = room[first : first + len(data)]
    assert is_fresh(into)
    fill(into, data)
    assert into == data
    assert len(data) - 2 * PAGE_BYTES < sum(made) <= len(data)
    touched = -(-(first + len(data)) // PAGE_BYTES)
    assert resident(room) == [True] * touched + [False] * (256 - touched), "more than asked for"
    assert bytes(room[:first]) == bytes(first), "what lies before is as it was"
    assert not is_fresh(into)


@made_here
def test_a_page_that_is_there_is_written_to(made):
    room, data = memory(SIZE), content()
    room[20 * PAGE_BYTES] = 7
    fill(room, data)
    assert room == data
    assert made == [20 * PAGE_BYTES], "up to there"


@made_here
@pytest.mark.parametrize("given_back", [False, True])
def test_memory_is_like_any_other_afterwards(made, given_back):
    mapping = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fill(memoryview(mapping)[:SIZE], content())
    assert sum(made)
    if given_back:  # a page that is missing again has to come, and nobody serves it but the system
        mapping.madvise(mmap.MADV_DONTNEED)
        assert mapping[5 * PAGE_BYTES] == 0
    mapping[900_000] = 1
    assert services() == 0


@made_here
def test_memory_that_may_not_be_read_is_not_made_of(made):
    """The system says how far it came."""
    room, source = memory(SIZE), mmap.mmap(-1, 1 << 20)
    copy(memoryview(source)[:SIZE], content())
    libc().mprotect(
        ctypes.c_void_p((address(memoryview(source)) or 0) + 40 * PAGE_BYTES),
        ctypes.c_size_t(PAGE_BYTES), ctypes.c_int(0),
    )  # fmt: skip
    done = fresh_memory._make(address(room), address(memoryview(source)), 70 * PAGE_BYTES)
    assert 0 < done <= 40 * PAGE_BYTES
    room[60 * PAGE_BYTES] = 1  # nobody waits


@made_here
def test_threads_fill_their_parts_of_one_memory_while_its_service_is_kept(made):
    parts, room = 8, memory(8 * SIZE)
    data = [content(seed=number) for number in range(parts)]
    with filling():
        assert services() == 1
        threads = [
            threading.Thread(target=fill, args=(room[n * SIZE : (n + 1) * SIZE], data[n]))
            for n in range(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert room == b"".join(data)
    assert services() == 0


@made_here
def test_memory_that_the_system_keeps_in_its_charge_is_touched_by_nobody(made, monkeypatch):
    """Whoever did would wait for what nobody brings."""
    ask = userfault._ask

    def refused(descriptor, request, about):
        return -1 if request is userfault._UNREGISTER else ask(descriptor, request, about)

    monkeypatch.setattr(userfault, "_ask", refused)
    room = memory(SIZE)
    room[20 * PAGE_BYTES] = 7
    with filling(), pytest.raises(UnusableSnapshot, match="cannot be filled"):
        fill(room, content())
    room[60 * PAGE_BYTES] = 7  # with the service, its charge has ended
    whole = memory(SIZE)
    fill(whole, content())
    assert whole == content(), "there is nothing left to be touched"


@made_here
def test_an_interrupt_leaves_no_memory_in_its_charge(made, monkeypatch):
    ask = userfault._ask

    def interrupted(descriptor, request, about):
        if request is userfault._COPY:
            raise KeyboardInterrupt
        return ask(descriptor, request, about)

    room = memory(SIZE)
    with filling():
        with monkeypatch.context() as patch:
            patch.setattr(userfault, "_ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fill(room, content())
        room[5 * PAGE_BYTES] = 7
    assert services() == 0


FORKS = """
import os, sys
from trainckpt.tiers.direct import memory
from trainckpt.tiers.fresh_memory import fill
from trainckpt.tiers.userfault import filling
room, data = memory(1 << 20), memoryview(bytearray(b"7" * (1 << 20)))
with filling():
    before = len(os.listdir("/proc/self/fd"))
    child = os.fork()
    if not child:
        assert len(os.listdir("/proc/self/fd")) == before - 1, "it has the parent's"
        fill(room, data)
        os._exit(0 if bytes(room) == bytes(data) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(room) == bytes(1 << 20), "the child has filled this process's memory"
    child = os.fork()
if not child:  # it has left what it never entered
    with filling():
        assert len(os.listdir("/proc/self/fd")) == before
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@made_here
def test_a_forked_process_fills_its_own(made):
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def refused(monkeypatch):
    """As in a container that forbids the call."""
    monkeypatch.setattr(userfault, "_CALLS", {})
    userfault.is_available.cache_clear()
    yield
    userfault.is_available.cache_clear()


def test_where_the_system_refuses_it_is_a_copy_like_any_other(refused, made):
    room, data = memory(SIZE), content()
    assert not is_fresh(room)
    fill(room, data)
    assert room == data
    with filling():
        fill(room, content(seed=6))
    assert room == content(seed=6)
    assert made == []


@pytest.mark.parametrize("what", ["between", "always"])
def test_where_larger_pages_are_given_they_are_not_made_small(pages, made, what):
    setattr(pages, what, True)
    room, data = memory(SIZE), content()
    assert not is_fresh(room)
    fill(room, data)
    assert (room, made) == (data, [])


def test_what_is_small_and_what_has_no_address_is_copied(made):
    room = memory(FROM_BYTES)
    fill(room[:100], memoryview(bytes(range(100))))
    assert bytes(room[:100]) == bytes(range(100))
    fill(room[1:], memoryview(bytes(FROM_BYTES - 1)))
    assert made == []
