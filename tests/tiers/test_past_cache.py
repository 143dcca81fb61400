"""Past the cache: the bytes that any copy makes, and nothing around them; or any copy."""

from __future__ import annotations

import importlib.util
import random

import pytest

from trainckpt.tiers import past_cache
from trainckpt.tiers.direct import PAGE_BYTES, address, memory, populate
from trainckpt.tiers.past_cache import FROM_BYTES


@pytest.fixture
def anew():
    """What is found is looked for again, and after the test once more."""
    past_cache.functions.cache_clear()
    yield
    past_cache.functions.cache_clear()


@pytest.mark.parametrize("copy", [past_cache.copy, past_cache.copy_holding])
@pytest.mark.parametrize("num_bytes", [1, 4095, FROM_BYTES - 1, FROM_BYTES, 3 * FROM_BYTES + 77])
@pytest.mark.parametrize(("to", "of"), [(0, 0), (64, 0), (1, 0), (8, 4), (63, 61)])
def test_it_copies_what_it_is_told_and_writes_nothing_around_it(copy, num_bytes, to, of):
    source, target = memory(num_bytes + 128), memory(num_bytes + 128)
    source[:] = random.Random(num_bytes).randbytes(len(source))
    target[:] = before = b"\xa5" * len(target)
    copy(address(target) + to, address(source) + of, num_bytes)
    assert target[to : to + num_bytes] == source[of : of + num_bytes]
    assert target[:to] == before[:to]
    assert target[to + num_bytes :] == before[to + num_bytes :]


@pytest.mark.skipif(not past_cache.is_for_this_machine(), reason="no AVX-512")
def test_it_pays_for_what_is_large_and_goes_to_memory_that_is_there():
    block = memory(2 * FROM_BYTES)
    assert not past_cache.pays(address(block), len(block))
    populate(block)
    assert past_cache.pays(address(block), len(block))
    assert past_cache.pays(address(block) + 3, FROM_BYTES)
    assert not past_cache.pays(address(block), FROM_BYTES - 1)


@pytest.mark.parametrize(
    ("flags", "is_for"),
    [
        ("fpu avx2 avx512f avx512bw avx512vl amx_int8", True),
        ("fpu avx2 avx512f avx512bw", False),
        ("fpu avx2", False),
    ],
)
def test_where_the_librarys_copy_goes_through_the_cache_it_is_not_used(
    anew, monkeypatch, tmp_path, flags, is_for
):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n\nprocessor\t: 1\n")
    monkeypatch.setattr(past_cache, "_CPUINFO", path)
    assert past_cache.is_for_this_machine() is is_for
    assert is_for or past_cache.functions() is None
    path.unlink()
    assert not past_cache.is_for_this_machine()


def test_without_the_library_or_its_function_all_is_copied_as_ever(anew, monkeypatch):
    block = memory(FROM_BYTES)
    populate(block)
    for found in (None, importlib.util.find_spec("xxhash"), importlib.util.find_spec("_ctypes")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=found: found)
        past_cache.functions.cache_clear()
        assert past_cache.functions() is None
        assert not past_cache.pays(address(block), len(block))
        source = memory(PAGE_BYTES)
        source[:] = b"\x07" * PAGE_BYTES
        for copy in (past_cache.copy, past_cache.copy_holding):
            block[:PAGE_BYTES] = bytes(PAGE_BYTES)
            copy(address(block), address(source), PAGE_BYTES)
            assert block[:PAGE_BYTES] == source


def test_what_does_not_copy_all_or_writes_more_is_not_used():
    def too_little(target, source, num_bytes):
        past_cache.copy(target, source, num_bytes - 1)

    def too_much(target, source, num_bytes):
        past_cache.copy(target - 1, source - 1, num_bytes + 1)

    assert past_cache._copies(past_cache.copy)
    assert not past_cache._copies(too_little)
    assert not past_cache._copies(too_much)
