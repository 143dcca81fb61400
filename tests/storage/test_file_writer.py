"""A file written in parts by several threads holds exactly them, wherever they lie; or is not."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainckpt.errors import TierUnavailable
from trainckpt.storage import direct_io
from trainckpt.storage.local import Disk, LocalTier

PAGE = direct_io.PAGE_BYTES
FROM, PIECE = 2 * PAGE, 4 * PAGE  # small, so that many sizes can be tried
BORDERS = (
    0,
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    FROM - 1,
    FROM,
    FROM + 1,
    PIECE - 1,
    PIECE,
    PIECE + 1,
    2 * PIECE + 1,
    3 * PIECE - PAGE + 7,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct_io, "FROM_BYTES", FROM)
    monkeypatch.setattr(direct_io, "WRITE_PIECE_BYTES", PIECE)


class Noting(Disk):
    """Knows which threads wrote, and how many bytes went past the page cache."""

    def __init__(self):
        self.direct, self.num_direct, self.reserved = set(), 0, []
        self.threads, self.counting = set(), threading.Lock()

    def open_direct(self, path):
        descriptor = super().open_direct(path)
        self.direct.add(descriptor)
        return descriptor

    def reserve(self, path, descriptor, num_bytes):
        self.reserved.append(num_bytes)
        super().reserve(path, descriptor, num_bytes)

    def write(self, path, descriptor, block, first_byte):
        super().write(path, descriptor, block, first_byte)
        with self.counting:
            self.threads.add(threading.get_ident())
            self.num_direct += len(block) if descriptor in self.direct else 0


def memory(random, num_bytes, address):
    """Random bytes at an address that is congruent to `address`."""
    block = direct_io.private_memory(num_bytes, address)
    block[:] = random.randbytes(num_bytes)
    return block


def drawn(sizes, misplaced, random):
    """Parts one after the other, in any order; those named lie otherwise than in the file."""
    parts, at = [], 0
    for number, size in enumerate(sizes):
        parts.append((at, memory(random, size, at + 8 * (number in misplaced))))
        at += size
    expected = b"".join(bytes(block) for _, block in parts)
    random.shuffle(parts)
    return parts, expected


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.sampled_from(BORDERS) | st.integers(0, 5 * PIECE), max_size=5),
    misplaced=st.sets(st.integers(0, 4)),
    seed=st.integers(0, 2**32),
)
@example(sizes=[], misplaced=set(), seed=0)
@example(sizes=[3 * PIECE + 5], misplaced=set(), seed=0)
def test_whatever_the_parts_their_places_and_their_order(tmp_path, sizes, misplaced, seed):
    parts, expected = drawn(sizes, misplaced, Random(seed))
    tier = LocalTier(tmp_path / "run")
    tier.write_parts("k", len(expected), iter(parts))
    assert (tmp_path / "run" / "k").read_bytes() == expected
    tier.remove("k")


def test_whole_pages_of_a_large_part_go_past_the_page_cache_and_the_rest_through_it(tmp_path):
    disk = Noting()
    tier = LocalTier(tmp_path, disk)
    size = 40 * PIECE + 13
    block = memory(Random(0), size, 100)
    tier.write_parts("k", 100 + size, [(100, block), (0, memoryview(b"h" * 100))])
    assert (tmp_path / "k").read_bytes() == b"h" * 100 + bytes(block)
    if not tier._direct.works:
        pytest.skip("this file system refuses O_DIRECT")
    assert disk.num_direct == (100 + size) // PAGE * PAGE - PAGE
    assert disk.reserved == [100 + size]
    assert 2 <= len(disk.threads) <= 1 + direct_io.NUM_WRITERS


class NotOpened(Disk):
    def open_direct(self, path):
        raise OSError(errno.EINVAL, "Invalid argument")


class NotWritten(Noting):
    """Refuses the second and every later direct write, as a file system may."""

    def write(self, path, descriptor, block, first_byte):
        if descriptor in self.direct and self.num_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().write(path, descriptor, block, first_byte)


@pytest.mark.parametrize("disk", [NotOpened, NotWritten])
def test_where_direct_writes_are_refused_the_same_bytes_go_through_the_cache(
    tmp_path, disk, caplog
):
    tier = LocalTier(tmp_path, disk())
    with caplog.at_level("DEBUG", "trainckpt"):
        for name in "ab":
            parts, expected = drawn([9 * PIECE + 1, 3 * PIECE], set(), Random(1))
            tier.write_parts(name, len(expected), parts)
            assert (tmp_path / name).read_bytes() == expected
            tier.write(f"{name}2", [block for _, block in sorted(parts, key=lambda p: p[0])])
            assert (tmp_path / f"{name}2").read_bytes() == expected
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} refuses O_DIRECT (Invalid argument)")


class Failing(Noting):
    """Some write, or an earlier call, fails."""

    def __init__(self, call, number):
        super().__init__()
        self.call, self.number = call, number

    def write(self, path, descriptor, block, first_byte):
        super().write(path, descriptor, block, first_byte)
        if self.call == "write" and first_byte >= 5 * PIECE:
            raise OSError(self.number, os.strerror(self.number))

    def reserve(self, path, descriptor, num_bytes):
        if self.call == "reserve":
            raise OSError(self.number, os.strerror(self.number))
        super().reserve(path, descriptor, num_bytes)

    def sync(self, path, descriptor):
        if self.call == "sync":
            raise OSError(self.number, os.strerror(self.number))
        super().sync(path, descriptor)


@pytest.mark.parametrize(
    ("call", "number"),
    [("reserve", errno.ENOSPC), ("write", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO)],
)
def test_what_fails_leaves_no_file_and_says_why(tmp_path, call, number):
    disk = Failing(call, number)
    parts, expected = drawn([9 * PIECE + 1, 3 * PIECE], set(), Random(1))
    with pytest.raises(TierUnavailable, match=os.strerror(number)) as caught:
        LocalTier(tmp_path, disk).write_parts("k", len(expected), parts)
    assert list(tmp_path.iterdir()) == []
    assert (call == "reserve") == (not disk.threads)  # a full disk is known before any write
    if number == errno.ENOSPC:
        assert "free space" in caught.value.hint


def test_a_space_that_cannot_be_reserved_is_written_anyway(tmp_path, monkeypatch):
    from trainckpt.storage import local

    def refused(*_):
        local.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    for instead in (refused, None):
        monkeypatch.setattr(local, "_fallocate", instead)
        tier = LocalTier(tmp_path)
        tier.write_parts("k", 5, [(0, memoryview(b"12345"))])
        assert tier.read("k", max_bytes=5) == b"12345"
        tier.remove("k")


def test_if_what_gives_the_parts_raises_no_file_is_left(tmp_path):
    def parts():
        yield 0, memory(Random(0), 9 * PIECE, 0)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        LocalTier(tmp_path).write_parts("k", 10 * PIECE, parts())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "places", [[(0, 4), (5, 5)], [(0, 4), (3, 6)], [(0, 9)], [(0, 11)], [(1, 9)], []]
)
def test_a_gap_an_overlap_and_another_length_are_refused(tmp_path, places):
    parts = [(at, memoryview(bytes(size))) for at, size in places]
    with pytest.raises(ValueError, match="not put once"):
        LocalTier(tmp_path).write_parts("k", 10, parts)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_exists_stays_as_it_is(tmp_path):
    tier = LocalTier(tmp_path)
    tier.write_parts("k", 3, [(0, memoryview(b"old"))])
    with pytest.raises(TierUnavailable):
        tier.write_parts("k", 3, [(0, memoryview(b"new"))])
    assert tier.read("k", max_bytes=3) == b"old"


def test_no_thread_and_no_descriptor_is_left(tmp_path):
    parts, expected = drawn([9 * PIECE + 1], set(), Random(0))
    LocalTier(tmp_path).write_parts("k", len(expected), parts)
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert not [t for t in threading.enumerate() if t.name == "trainckpt-write"]


class Lost(Disk):
    """Somebody else puts a file of his own in the place of each, and syncing fails."""

    def sync(self, path, descriptor):
        path.unlink()
        path.write_bytes(b"another's")
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_who_fails_removes_his_own_file_and_no_other(tmp_path):
    tier = LocalTier(tmp_path, Lost())
    for name, write in (
        ("k", lambda: tier.write("k", [memoryview(b"1")])),
        ("l", lambda: tier.write_parts("l", 1, [(0, memoryview(b"1"))])),
    ):
        with pytest.raises(TierUnavailable):
            write()
        assert (tmp_path / name).read_bytes() == b"another's"
