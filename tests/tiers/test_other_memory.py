"""Memory of another process is read as it is there, or the reason why not is an `OSError`."""

from __future__ import annotations

import errno
import os

import pytest

from tests.tiers.siblings import SIZE, holder, must_be_readable
from trainckpt.tiers import other_memory
from trainckpt.tiers.other_memory import Place


@pytest.fixture
def sibling():
    must_be_readable()
    with holder() as found:
        yield found


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


@pytest.mark.parametrize(
    ("scope", "asked"), [("0", []), ("1", ["parent", 0]), ("2", []), (None, [])]
)
def test_others_are_let_in_only_where_that_helps_and_no_longer_than_needed(
    tmp_path, monkeypatch, scope, asked
):
    yama, calls = tmp_path / "ptrace_scope", []
    if scope is not None:
        yama.write_text(scope + "\n")
    monkeypatch.setattr(other_memory, "_YAMA", yama)
    monkeypatch.setattr(other_memory, "_let_debug", calls.append)
    with other_memory.open_to_siblings():
        assert calls == [os.getppid() for each in asked if each]
    assert calls == [each and os.getppid() for each in asked]
