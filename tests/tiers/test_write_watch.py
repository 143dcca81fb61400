"""Whoever writes to memory that is watched is seen, whatever way the write comes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from pathlib import Path

import pytest

from tests.state.helpers import marks_pages
from trainckpt.tiers import userfault
from trainckpt.tiers.direct import address, libc
from trainckpt.tiers.write_watch import WriteWatch

PAGE = mmap.PAGESIZE
PAGES = 64
SIZE = PAGES * PAGE
DROP, FIXED = 4, 0x10  # MADV_DONTNEED, MAP_FIXED
AT = 7 * PAGE + 100  # where it is written

can_mark = pytest.mark.skipif(not marks_pages(), reason="this system marks no pages")


@pytest.fixture
def room():
    """Memory of this process alone, and where it lies."""
    memory = memoryview(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = os.urandom(SIZE)
    return memory, address(memory)


@pytest.fixture
def watch():
    found = WriteWatch()
    yield found
    found.end()


def by_python(memory, _, __):
    memory[AT] ^= 1


def by_the_same_byte(memory, _, __):
    memory[AT] = memory[AT]


def by_a_library(_, where, __):
    ctypes.memmove(where + AT, b"x", 1)


def by_another_thread(memory, where, folder):
    thread = threading.Thread(target=by_python, args=(memory, where, folder))
    thread.start()
    thread.join()


def by_a_read(memory, _, folder):
    (folder / "file").write_bytes(b"x")
    with (folder / "file").open("rb", buffering=0) as file:
        file.readinto(memory[AT : AT + 1])


def by_a_read_past_the_cache(memory, _, folder):
    (folder / "file").write_bytes(bytes(PAGE))
    try:
        file = os.open(folder / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no O_DIRECT in this file system")
    first = AT // PAGE * PAGE
    os.preadv(file, [memory[first : first + PAGE]], 0)
    os.close(file)


def by_another_process(_, where, __):
    reader, writer = os.pipe()
    if not os.fork():
        local, remote = (ctypes.c_size_t * 2)(), (ctypes.c_size_t * 2)(where + AT, 1)
        data = ctypes.create_string_buffer(b"x")
        local[:] = ctypes.addressof(data), 1
        number = {"x86_64": 311, "aarch64": 271}[os.uname().machine]  # process_vm_writev
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        parent = ctypes.c_int(os.getppid())
        done = libc().syscall(ctypes.c_long(number), parent, local, one, remote, one, none)
        os.write(writer, b"1" if done == 1 else b"0")
        os._exit(0)
    did = os.read(reader, 1)
    os.wait()
    os.close(reader)
    os.close(writer)
    if did != b"1":
        pytest.skip("this system lets no process write to another's memory")


def by_dropping_it(_, where, __):
    assert not libc().madvise(ctypes.c_void_p(where + AT // PAGE * PAGE), PAGE, DROP)


def by_other_memory_in_its_place(_, where, __):
    libc().mmap.restype = ctypes.c_void_p
    first = ctypes.c_void_p(where + AT // PAGE * PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
    found = libc().mmap(first, ctypes.c_size_t(PAGE), 3, flags, -1, ctypes.c_long(0))
    assert found == first.value


@can_mark
@pytest.mark.parametrize(
    "write",
    [by_python, by_the_same_byte, by_a_library, by_another_thread, by_a_read,
     by_a_read_past_the_cache, by_another_process, by_dropping_it, by_other_memory_in_its_place],
)  # fmt: skip
def test_a_write_is_seen_on_its_page_and_on_no_other(room, watch, tmp_path, write):
    memory, where = room
    assert watch.begin(where, SIZE)
    assert bytes(memory)  # to read it is no write
    assert watch.written(where, SIZE) == []
    write(memory, where, tmp_path)
    page = AT // PAGE
    assert watch.written(where, SIZE) == [(page * PAGE, (page + 1) * PAGE)]


@can_mark
def test_ends_that_are_no_whole_pages_count_as_written(room, watch):
    memory, where = room
    begin, size = PAGE + 300, 5 * PAGE
    ends = [(0, PAGE - 300), (5 * PAGE - 300, size)]
    assert watch.begin(where + begin, size)
    assert watch.written(where + begin, size) == ends
    memory[3 * PAGE : 4 * PAGE + 1] = bytes(PAGE + 1)
    assert watch.written(where + begin, size) == [
        ends[0], (2 * PAGE - 300, 4 * PAGE - 300), ends[1]
    ]  # fmt: skip


@can_mark
def test_ends_count_as_written_also_where_they_were_marked_for_others(room, watch):
    _, where = room
    assert watch.begin(where, SIZE)
    assert watch.written(where + 1, 3 * PAGE) == [(0, PAGE - 1), (3 * PAGE - 1, 3 * PAGE)]
    assert watch.written(where + 1, 1) == [(0, 1)]


@can_mark
def test_what_is_watched_is_not_marked_again_so_nobody_s_write_is_hidden(room, watch):
    memory, where = room
    assert watch.begin(where + 4 * PAGE, 8 * PAGE)
    memory[AT] ^= 1
    for first, pages in ((4, 8), (5, 1), (0, 8), (11, 3), (0, PAGES)):
        assert not watch.begin(where + first * PAGE, pages * PAGE)
    assert watch.begin(where, 4 * PAGE)
    assert watch.begin(where + 12 * PAGE, 4 * PAGE)
    assert watch.written(where, 16 * PAGE) == [(AT // PAGE * PAGE, (AT // PAGE + 1) * PAGE)]


@can_mark
def test_memory_that_is_not_watched_counts_as_written(room, watch):
    memory, where = room
    assert watch.begin(where, 2 * PAGE)
    assert watch.written(where, 4 * PAGE) == [(2 * PAGE, 4 * PAGE)]
    assert watch.written(where, 2 * PAGE) == []
    watch.end()
    assert watch.written(where, 2 * PAGE) is None
    memory[0] = 1


@can_mark
@pytest.mark.parametrize("dropped", [False, True])
def test_memory_that_others_map_too_counts_as_written(watch, dropped):
    memory = memoryview(mmap.mmap(-1, SIZE))  # shared
    memory[:] = bytes(SIZE)
    where = address(memory)
    watch.begin(where, SIZE)
    if dropped:  # its entries alone: a mark without a page is left
        assert not libc().madvise(ctypes.c_void_p(where), ctypes.c_size_t(SIZE), DROP)
    if not (child := os.fork()):
        memory[AT] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert watch.written(where, SIZE) in (None, [(0, SIZE)])
    assert memory[AT] == 1


@can_mark
def test_what_is_a_file_s_again_counts_as_written(watch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE))
    memory[:] = b"x" * SIZE
    where = address(memory)
    watch.begin(where, SIZE)
    assert not libc().madvise(ctypes.c_void_p(where), ctypes.c_size_t(SIZE), DROP)
    assert watch.written(where, SIZE) in (None, [(0, SIZE)])
    assert memory[AT] == 0


@can_mark
def test_a_forked_process_finds_all_written_and_closes_nothing_of_its_own(room, watch, tmp_path):
    memory, where = room
    assert watch.begin(where, SIZE)
    if not (child := os.fork()):
        code = 1
        try:
            own = os.open(tmp_path / "own", os.O_CREAT | os.O_RDWR)  # the number that was freed
            memory[0] = 1
            written = watch.written(where, SIZE)
            begun = watch.begin(where, SIZE)
            watch.end()
            os.write(own, b"x")
            code = 0 if (written, begun) == ([(0, SIZE)], False) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watch.written(where, SIZE) == []  # what the child wrote was its own
    memory[AT] ^= 1
    assert watch.written(where, SIZE)


@can_mark
def test_after_its_end_nothing_is_marked_and_no_descriptor_is_open(room, watch):
    memory, where = room
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert watch.begin(where, SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    assert watched_flags(where)
    watch.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not watched_flags(where)
    memory[:] = bytes(SIZE)


@can_mark
def test_one_that_nobody_has_any_more_closes_its_descriptor(room):
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    watch = WriteWatch()
    assert watch.begin(room[1], SIZE)
    del watch
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def watched_flags(where):
    """Whether the system says that the memory there is watched ("uw")."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= where < end
        elif first == "VmFlags:" and inside:
            return "uw" in line.split()
    raise AssertionError("no such memory")


@pytest.mark.parametrize("why", ["no service", "no list of pages", "no memory"])
def test_where_the_system_does_not_say_nothing_is_known(room, watch, monkeypatch, why):
    memory, where = room
    if why == "no service":
        monkeypatch.setattr(userfault, "_CALLS", {})
        assert not watch.begin(where, SIZE)
    elif why == "no memory":
        assert not watch.begin(0, PAGE)
    else:
        watch.begin(where, SIZE)
        opens = os.open

        def refused(path, *args, **kwargs):
            if str(path).startswith("/proc"):
                raise PermissionError(13, "it is hidden", path)
            return opens(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refused)
    assert watch.written(where, SIZE) in (None, [(0, SIZE)])
    assert watch.written(where, SIZE) != []
    memory[0] = 1
