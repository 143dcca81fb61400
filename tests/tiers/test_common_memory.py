"""Memory of several processes: each writes a part, all read; forked ones are none of them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import common_memory
from trainckpt.tiers.common_memory import CommonMemory, put
from trainckpt.tiers.direct import address, at_address, libc
from trainckpt.tiers.memory import MemoryPlace

SIZE = 3 << 20
WRITER = f"""
import sys
from trainckpt.tiers.common_memory import CommonMemory, put
memory = CommonMemory.opened(sys.argv[1]).mapped({SIZE})
put(memory[1000:2000], b"w" * 1000)
print(bytes(memory[:3]).hex())
"""


@pytest.fixture
def common():
    one = CommonMemory.make()
    yield one
    one.close()


def other(target):
    command = [sys.executable, "-c", WRITER, str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_another_process_writes_is_there_and_it_sees_what_was_written(common):
    memory = common.mapped(SIZE)
    put(memory[:3], b"abc")
    done = other(common.target)
    assert done.stdout.strip() == b"abc".hex(), done.stderr
    assert bytes(memory[999:2001]) == b"\0" + b"w" * 1000 + b"\0"


def test_what_was_mapped_stays_when_nobody_can_open_it_any_more():
    common = CommonMemory.make()
    memory, target = common.mapped(SIZE), common.target
    put(memory[5:8], b"xyz")
    common.close()
    assert other(target).returncode == 1
    assert bytes(memory[5:8]) == b"xyz"


@pytest.mark.parametrize(
    "told", ["", "memfd:", f"memfd:{'0' * 32}@1/0", f"memfd:{'0' * 32}@{2**40}/3"]
)
def test_memory_that_is_not_there_is_an_error(told):
    with pytest.raises(OSError, match="there is no such memory"):
        CommonMemory.opened(told)


def test_nobody_makes_it_shorter_than_another_thinks_it_is(common):
    mine = CommonMemory.opened(str(common.target))
    long, short = common.mapped(SIZE), mine.mapped(10)
    mine.close()
    put(long[SIZE - 1 :], b"z")
    put(short[:1], b"a")
    assert (long[0], long[SIZE - 1]) == (ord("a"), ord("z"))


def test_memory_that_cannot_be_had_is_no_fault_of_the_file_that_is_read(common):
    memory = common.mapped(SIZE)
    os.dup2(os.open(os.devnull, os.O_RDONLY), memory.obj._descriptor)
    with pytest.raises(UnusableSnapshot, match="for all ranks of this host cannot be had"):
        put(memory[:3], b"abc")


def test_where_memory_must_be_set_aside_there_is_none(monkeypatch, tmp_path):
    (tmp_path / "overcommit_memory").write_text("2\n")
    monkeypatch.setattr(common_memory, "_OVERCOMMIT", tmp_path / "overcommit_memory")
    with pytest.raises(OSError, match="no pages to spare"):
        CommonMemory.make()


def in_a_child(act):
    """What it says in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(act()).encode())
        except BaseException as error:  # it must not go on as a second test run
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 1000).decode()
    for descriptor in (reading, writing):
        os.close(descriptor)
    return said


@pytest.mark.parametrize("whose", ["of a host's ranks", "an arena"])
def test_what_a_forked_process_forgets_is_not_unmapped_there(common, whose, tmp_path):
    """Something else may lie there by then."""
    place = MemoryPlace.of(str(tmp_path))
    arena = place.arena(0, 0)
    arena.reserve(SIZE)
    memory = [common.mapped(SIZE) if whose != "an arena" else arena.memory]
    where = address(memory[0])

    def forget():
        libc().mmap.restype = ctypes.c_void_p
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        libc().mmap(ctypes.c_void_p(where), ctypes.c_size_t(SIZE), 3, fixed, -1, ctypes.c_long(0))
        other = at_address(where, SIZE)
        other[5] = 7
        memory.clear()
        arena.close()
        gc.collect()
        return other[5]

    assert in_a_child(forget) == "7"
    memory.clear()
    arena.remove()
    place.remove()


def test_a_forked_process_keeps_none_of_it(common):
    memory = common.mapped(SIZE)
    put(memory[:1], b"a")
    mine = os.fstat(memory.obj._descriptor).st_ino

    def look():
        names = Path("/proc/self/fd").iterdir()
        held = sum(name.stat().st_ino == mine for name in names if name.exists())
        return held, "memfd:trainckpt-" in Path("/proc/self/maps").read_text()

    assert in_a_child(look) == "(0, False)"
    assert memory[0] == ord("a")


def test_what_forked_processes_write_to_nothing_still_goes_there(common):
    """Descriptors are let go of by becoming those of /dev/null."""
    memory = [common.mapped(SIZE), common.mapped(SIZE)]  # of one file
    nothing = os.open(os.devnull, os.O_WRONLY)

    def write():
        return os.write(nothing, b"gone")

    assert in_a_child(write) == "4"
    assert in_a_child(lambda: in_a_child(write)) == repr("4")
    os.close(nothing)
    memory.clear()


def test_other_memory_is_copied_to():
    plain = bytearray(5)
    put(memoryview(plain)[1:4], memoryview(b"abc"))
    assert plain == b"\0abc\0"
