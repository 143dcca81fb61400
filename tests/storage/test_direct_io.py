"""Memory by its address: the very bytes, kept as long as somebody looks, made before its time."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest

from trainckpt.storage.direct_io import PAGE_BYTES, address, at_address, populate, private_memory


class Owner:
    def __init__(self):
        self.data = ctypes.create_string_buffer(b"0123456789", 10)


def test_the_bytes_at_an_address_are_the_very_ones_and_no_more():
    owner = Owner()
    view = at_address(ctypes.addressof(owner.data) + 2, 5)
    assert bytes(view) == b"23456"
    view[0] = ord("x")
    assert owner.data.raw == b"01x3456789"
    assert (len(view), view.nbytes, view.itemsize, view.contiguous) == (5, 5, 1, True)
    assert len(at_address(ctypes.addressof(owner.data), 0)) == 0


def test_whoever_looks_at_a_part_keeps_the_owner():
    owner = Owner()
    told = weakref.ref(owner)
    part = at_address(ctypes.addressof(owner.data), 10, owner)[3:]
    del owner
    gc.collect()
    assert bytes(part) == b"3456789"
    assert told() is not None
    del part
    gc.collect()
    assert told() is None


@pytest.mark.parametrize(
    ("first", "length"), [(0, 10), (1, 3), (5, 0), (0, 0), (4095, 8200), (9, 4096)]
)
def test_memory_is_made_without_a_change_wherever_it_begins(first, length):
    whole = private_memory(5 * PAGE_BYTES)
    whole[:] = bytes(range(256)) * (len(whole) // 256)
    before = bytes(whole)
    populate(whole[first : first + length])
    assert bytes(whole) == before
    assert address(whole) is not None


def test_what_cannot_be_written_to_is_not_made():
    populate(memoryview(b"read only" * 4096))
