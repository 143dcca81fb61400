"""Parts of a file that several threads read are what stands there, wherever they lie."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.storage import direct_io
from trainckpt.storage.local import Disk, LocalTier

PAGE = direct_io.PAGE_BYTES
FROM, PIECE = 2 * PAGE, 4 * PAGE  # small, so that many sizes can be tried
SIZE = 30 * PAGE + 17
DATA = Random(0).randbytes(SIZE)
NEAR = (
    0,
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    FROM,
    PIECE,
    PIECE + 1,
    2 * PIECE,
    SIZE - PAGE - 17,
    SIZE - 1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct_io, "FROM_BYTES", FROM)
    monkeypatch.setattr(direct_io, "PIECE_BYTES", PIECE)


@pytest.fixture
def place(tmp_path):
    LocalTier(tmp_path).write("k", [memoryview(DATA)])
    return tmp_path


class Noting(Disk):
    """Knows how much was read, and how much of it past the page cache."""

    def __init__(self):
        self.direct, self.num_bytes, self.num_direct = set(), 0, 0
        self.counting = threading.Lock()

    def open_to_read(self, path, *, direct=False):
        descriptor = super().open_to_read(path, direct=direct)
        self.direct -= {descriptor}
        self.direct |= {descriptor} if direct else set()
        return descriptor

    def read(self, path, descriptor, into, first_byte):
        got = super().read(path, descriptor, into, first_byte)
        with self.counting:
            self.num_bytes += got
            self.num_direct += got if descriptor in self.direct else 0
        return got


def destinations(places, misplaced=()):
    """Memory for parts of the file, filled with something else; some lies as its bytes do."""
    found = []
    for number, (begin, end) in enumerate(places):
        into = direct_io.private_memory(end - begin, begin + 8 * (number in misplaced))
        into[:] = b"#" * (end - begin)
        found.append((begin, into))
    return found


offsets = st.sampled_from(NEAR) | st.integers(0, SIZE)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    places=st.lists(st.tuples(offsets, offsets).map(sorted), max_size=5),
    misplaced=st.sets(st.integers(0, 4)),
)
def test_whatever_the_parts_and_their_places(place, places, misplaced):
    parts, told = destinations(places, misplaced), []

    def done(number):
        begin, into = parts[number]
        assert into == DATA[begin : begin + len(into)]  # already now
        told.append(number)

    LocalTier(place).read_parts("k", parts, done)
    assert sorted(told) == list(range(len(parts)))
    assert all(into == DATA[begin : begin + len(into)] for begin, into in parts)


def test_whole_pages_of_large_parts_come_past_the_page_cache_and_nothing_comes_twice(place):
    disk = Noting()
    tier = LocalTier(place, disk)
    tier.read_parts("k", destinations([(5, 13 * PAGE), (13 * PAGE, SIZE)]), lambda number: None)
    assert disk.num_bytes == SIZE - 5
    if not tier._direct.works:
        pytest.skip("this file system refuses O_DIRECT")
    assert disk.num_direct == 29 * PAGE
    tier.read_parts("k", destinations([(PAGE, 20 * PAGE)], {0}), lambda number: None)
    assert disk.num_direct == 48 * PAGE  # by way of a buffer


class NotOpened(Disk):
    def open_to_read(self, path, *, direct=False):
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open_to_read(path)


class NotRead(Noting):
    """Refuses the third and every later direct read, as a file system may."""

    def read(self, path, descriptor, into, first_byte):
        if descriptor in self.direct and self.num_direct >= 2 * PIECE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().read(path, descriptor, into, first_byte)


@pytest.mark.parametrize("disk", [NotOpened, NotRead])
def test_where_direct_reads_are_refused_the_same_bytes_come_through_the_cache(place, disk, caplog):
    tier = LocalTier(place, disk())
    with caplog.at_level("DEBUG", "trainckpt"):
        for _ in range(2):
            parts = destinations([(3, 20 * PAGE), (20 * PAGE, SIZE), (0, SIZE)], {1})
            tier.read_parts("k", parts, lambda number: None)
            assert all(into == DATA[begin : begin + len(into)] for begin, into in parts)
    (line,) = caplog.messages
    assert line.startswith(f"{place} refuses O_DIRECT (Invalid argument)")


class Short(Disk):
    """Gives a third of what was asked for, through the page cache, where any length can be."""

    def open_to_read(self, path, *, direct=False):
        return super().open_to_read(path)

    def read(self, path, descriptor, into, first_byte):
        return super().read(path, descriptor, into[: max(1, len(into) // 3)], first_byte)


def test_short_reads_are_gone_on_with(place):
    parts = destinations([(0, SIZE), (7, 20 * PAGE)], {1})
    LocalTier(place, Short()).read_parts("k", parts, lambda number: None)
    assert all(into == DATA[begin : begin + len(into)] for begin, into in parts)


@pytest.mark.parametrize("length", [0, 1, PAGE, 9 * PAGE - 1, 9 * PAGE, 20 * PAGE + 5, SIZE - 1])
@pytest.mark.parametrize("misplaced", [(), {0}])
def test_a_file_that_ends_early_is_refused_by_name(place, length, misplaced):
    os.truncate(place / "k", length)
    parts = destinations([(0, SIZE)], misplaced)
    with pytest.raises(UnusableSnapshot, match="bytes too early") as caught:
        LocalTier(place).read_parts("k", parts, lambda number: None)
    assert caught.value.message.startswith("k ends ")
    if length:
        assert parts[0][1][:1] == DATA[:1]


def test_what_is_raised_of_a_part_ends_the_rest_whoever_has_read_it(place):
    """On the reading threads; and nobody reads on when the call has returned."""
    for bad in range(6):
        parts = destinations([(n * 5 * PAGE, (n + 1) * 5 * PAGE) for n in range(6)])
        over = []

        def done(number, bad=bad, over=over):
            assert not over
            if number == bad:
                raise UnusableSnapshot(f"part {bad} is bad")

        with pytest.raises(UnusableSnapshot, match=f"part {bad} is bad"):
            LocalTier(place).read_parts("k", parts, done)
        over.append(True)
        assert not [t for t in threading.enumerate() if t.name == "trainckpt-read"]


def test_what_the_system_refuses_is_an_error_of_the_tier_and_leaves_no_descriptor(place):
    class Ill(Disk):
        def read(self, path, descriptor, into, first_byte):
            if first_byte >= 2 * PIECE:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, descriptor, into, first_byte)

    with pytest.raises(TierUnavailable, match=os.strerror(errno.EIO)):
        LocalTier(place, Ill()).read_parts("k", destinations([(0, SIZE), (1, SIZE)]), print)
    with pytest.raises(UnusableSnapshot, match="missing"):
        LocalTier(place).read_parts("none", destinations([(0, SIZE)]), print)
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.startswith(str(place))]
