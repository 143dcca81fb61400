"""What other ranks have read comes verified, whatever the memory it comes to."""

from __future__ import annotations

import os
import random

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.shard_file import Region, block_bytes
from trainckpt.snapshot import taker as takers
from trainckpt.snapshot.blocks import Found, loads
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import fresh_memory, userfault
from trainckpt.tiers.direct import memory
from trainckpt.tiers.large_pages import LargePages
from trainckpt.tiers.other_memory import Place, place_of

SIZE = 3_000_000


@pytest.fixture
def theirs():
    return memoryview(bytearray(random.Random(3).randbytes(SIZE)))


def load_to(into, data):
    """One that is to have `data`, in blocks."""
    digests = digest.digests_by_block(data, block_bytes(SIZE))
    region = Region("w", "U8", (0,), (SIZE,), (SIZE,), digest=digests)
    (load,) = loads(Found("file", 0, region), 0, SIZE, into)
    return load


@pytest.fixture(params=["fresh", "touched", "not to be made"])
def room(request, tmp_path, monkeypatch):
    """Memory for all of it, which does not begin at a page."""
    if request.param == "not to be made":
        monkeypatch.setattr(userfault, "_CALLS", {})
        userfault.is_available.cache_clear()
    pages = LargePages(tmp_path)  # none
    monkeypatch.setattr(fresh_memory, "large_pages", lambda: pages)
    found = memory(SIZE, 1000)
    if request.param == "touched":
        found[:] = bytes(SIZE)
    yield found
    userfault.is_available.cache_clear()


@pytest.mark.parametrize("step", [1, 100_000, takers.STEP_BYTES])
def test_it_comes_as_it_is(room, theirs, monkeypatch, step):
    monkeypatch.setattr(takers, "STEP_BYTES", step)
    load = load_to(room, theirs)
    Taker().take(load, place_of(theirs))
    assert room == theirs
    assert load.verified is not None


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_what_has_changed_there_is_refused(room, theirs, at):
    load = load_to(room, theirs)
    theirs[at] ^= 1
    with pytest.raises(UnusableSnapshot, match="does not match its digest"):
        Taker().take(load, place_of(theirs))


def test_memory_that_is_not_there_is_an_error(room, theirs):
    with pytest.raises(OSError, match=str(os.getpid())):
        Taker().take(load_to(room, theirs), Place(os.getpid(), 4096, SIZE))
