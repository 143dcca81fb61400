"""Memory of another process is read as it is there, or the reason why not is an `OSError`."""

from __future__ import annotations

import errno
import secrets
import subprocess
import sys

import pytest

from trainckpt.tiers import other_memory
from trainckpt.tiers.other_memory import Place

SIZE = 3 << 20
HOLDER = f"""
import ctypes, os, sys
from trainckpt.tiers import other_memory
data = bytearray(bytes.fromhex(sys.stdin.readline()) * {SIZE // 32})
with other_memory.open_to_siblings():
    print(*other_memory.place_of(memoryview(data)), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def sibling():
    """Another process: what it holds, where, and its handle."""
    content = secrets.token_bytes(32)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(content.hex() + "\n")
        process.stdin.flush()
        place = Place(*map(int, process.stdout.readline().split()))
        yield content * (SIZE // 32), place, process
        process.kill()


def test_bytes_of_another_process_are_read_whole_and_in_parts(sibling):
    content, place, _ = sibling
    into = bytearray(SIZE)
    other_memory.read(place, memoryview(into))
    assert into == content
    part = bytearray(1000)
    other_memory.read(Place(place.process, place.address + 77, 1000), memoryview(part))
    assert part == content[77:1077]


def test_memory_that_ends_before_is_an_error(sibling):
    _, place, _ = sibling
    with pytest.raises(OSError, match=f"process {place.process}"):
        other_memory.read(Place(place.process, 4096, 100), memoryview(bytearray(100)))


def test_a_process_that_is_gone_is_an_error(sibling):
    _, place, process = sibling
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError) as caught:
        other_memory.read(place, memoryview(bytearray(SIZE)))
    assert caught.value.errno == errno.ESRCH


def test_memory_of_another_length_is_refused_before_anything_is_written(sibling):
    _, place, _ = sibling
    short = bytearray(SIZE - 1)
    with pytest.raises(OSError, match="do not go to memory of"):
        other_memory.read(place, memoryview(short))
    assert not any(short)


def test_what_has_no_address_of_its_own_is_not_told():
    with pytest.raises(ValueError, match="no address"):
        other_memory.place_of(memoryview(b"read only"))
