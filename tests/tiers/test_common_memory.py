"""Memory of several processes: each writes a part, all read; forked ones are none of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import common_memory, mapped
from trainckpt.tiers.common_memory import CommonMemory, put

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


def test_what_a_forked_process_forgets_is_not_unmapped_there(common):
    """Something else may lie there by then."""
    memory = common.mapped(SIZE)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        del memory
        gc.collect()
        os.write(writing, bytes([len(mapped._kept)]))
        os._exit(0)
    os.waitpid(child, 0)
    (kept,) = os.read(reading, 1)
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert kept >= 1


def test_a_forked_process_keeps_none_of_it(common):
    memory = common.mapped(SIZE)
    put(memory[:1], b"a")
    mine = os.fstat(memory.obj._descriptor).st_ino
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        names = Path("/proc/self/fd").iterdir()
        held = sum(name.stat().st_ino == mine for name in names if name.exists())
        mapped = "memfd:trainckpt-" in Path("/proc/self/maps").read_text()
        os.write(writing, bytes([held, mapped]))
        os._exit(0)
    os.waitpid(child, 0)
    held, mapped = os.read(reading, 2)
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert (held, mapped) == (0, 0)
    assert memory[0] == ord("a")


def test_other_memory_is_copied_to():
    plain = bytearray(5)
    put(memoryview(plain)[1:4], memoryview(b"abc"))
    assert plain == b"\0abc\0"
