"""What a rank reads it fills into the memory of those that asked; they believe none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.snapshot.test_board import Reading
from tests.snapshot.test_shares import equal, saved
from tests.tiers.test_handed_memory import can_borrow
from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot.board import OtherBoard, name_of
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import fresh_memory, handed_memory, userfault
from trainckpt.tiers.direct import memory
from trainckpt.tiers.handed_memory import Filler
from trainckpt.tiers.large_pages import LargePages
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.other_memory import Place

pytestmark = pytest.mark.skipif(
    not can_borrow(), reason="this system makes no pages with content, or lets nobody do it"
)


def of_small_pages():
    """In a process of its own."""
    pages = LargePages(Path("/nowhere"))
    fresh_memory.large_pages = lambda: pages
    handed_memory._is_one_node = lambda: True


def completions():
    """Loads of which the whole pages had come when they were taken, from now on."""
    found, complete = [], Taker._complete

    def counted(self, load, place):
        complete(self, load, place)
        found.append(load)

    Taker._complete = counted
    return found


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Makes the tensors of a snapshot, and two ranks that read it; what they have begun ends."""
    pages = LargePages(tmp_path / "none")
    monkeypatch.setattr(fresh_memory, "large_pages", lambda: pages)
    monkeypatch.setattr(handed_memory, "_is_one_node", lambda: True)
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    with userfault.filling():
        host = Reading(tier, manifest)
        yield tensors, host
        for reader in host.readers:
            reader.share.end()


@pytest.fixture
def completed(monkeypatch):
    monkeypatch.setattr(Taker, "_complete", Taker._complete)  # as it was, at the end
    return completions()


def asked(board):
    """Names of what a rank has asked for: what goes to large memory that nobody has touched."""
    found = OtherBoard(board.place).asked()
    assert found.where
    return set(found.where)


def finish(host):
    """Bytes that each rank had to read after all."""
    told = [reader.share.told() for reader in host.readers]
    return [reader.take(told) for reader in host.readers]


def test_what_is_read_after_another_has_asked_is_filled_in_there(two, completed):
    tensors, host = two
    left = list(host.read(1)._left)  # it asks, and waits
    host.read(0)
    assert {id(load) for load in host.early(1)} == {id(load) for load in left}
    assert set(map(name_of, completed)) == asked(host.boards[1])
    assert sum(len(load.into) for load in completed) > 500_000
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


def test_what_was_filled_in_and_not_taken_early_is_taken_at_the_end(two, completed):
    tensors, host = two
    share = host.read(1)
    taking = share._copying
    taking._wanted = {}  # its thread ends
    taking._thread.join()
    host.read(0)
    assert finish(host) == [0, 0]
    assert not taking._taken
    assert set(map(name_of, completed)) == asked(host.boards[1])
    assert all(equal(host.tensors(number), tensors) for number in range(2))


@pytest.mark.parametrize("how", ["other bytes", "half of it", "nothing"])
def test_what_is_filled_in_wrongly_is_copied(two, monkeypatch, how):
    tensors, host = two
    fill = Filler.fill

    def wrong(self, where, data):
        if how == "nothing":
            return False
        bad = memoryview(bytearray(data))
        bad[len(data) // 2] ^= 1
        return fill(self, where, bad if how == "other bytes" else data[: len(data) // 2])

    monkeypatch.setattr(Filler, "fill", wrong)
    host.read(1)
    host.read(0)
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


def test_memory_that_cannot_be_had_back_is_an_error_and_touched_by_nobody(two, monkeypatch):
    _, host = two
    host.read(1)
    host.read(0)
    with monkeypatch.context() as patch:
        patch.setattr(userfault, "discharge", lambda *_: False)
        told = [reader.share.told() for reader in host.readers]
        host.readers[1].share._copying._offered.offer(memory(1 << 20))
        with pytest.raises(UnusableSnapshot, match="cannot be filled"):
            host.readers[1].take(told)


def test_who_cannot_fill_in_says_that_it_is_there_all_the_same(two, monkeypatch, completed):
    tensors, host = two

    def refused(*_):
        raise OSError("as where processes may not debug each other")

    monkeypatch.setattr(userfault, "borrow", refused)
    left = list(host.read(1)._left)
    host.read(0)
    assert {id(load) for load in host.early(1)} == {id(load) for load in left}
    assert completed == []
    assert finish(host) == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


# The second rank, a process of its own: it has read its share and asks before the first reads.
RANK = """
import sys
from pathlib import Path
from tests.snapshot.test_board import Reading
from tests.snapshot.test_handing import of_small_pages, name_of, asked, completions
from tests.snapshot.test_shares import equal, saved
from trainckpt.snapshot.catalog import load_manifest
from trainckpt.format.names import SnapshotName
from trainckpt.tiers import other_memory, userfault
from trainckpt.tiers.local import LocalTier

of_small_pages()
completed = completions()
tier, run, name = LocalTier(Path(sys.argv[1])), sys.argv[2], SnapshotName.parse(sys.argv[3])
tensors, _ = saved(LocalTier(Path(sys.argv[4])), 2)
with userfault.filling():
    host = Reading(tier, load_manifest(tier, run, name))
    reader, board = host.readers[1], host.boards[1]
    print(*board.place, flush=True)
    reader.share._boards = [other_memory.Place(*map(int, sys.stdin.readline().split()))]
    host.read(1)
    print(flush=True)
    told = other_memory.Place(*map(int, sys.stdin.readline().split()))
    missed = reader.take([told])
    print(missed, set(map(name_of, completed)) == asked(board), equal(host.tensors(1), tensors))
    reader.share.end()
"""


def test_a_rank_that_is_a_process_of_its_own_gets_it_too(two, tmp_path):
    _, host = two
    manifest = host.manifest
    arguments = [str(tmp_path), manifest.run, str(manifest.name), str(tmp_path / "again")]
    with subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip

        def tell(place):
            other.stdin.write(" ".join(map(str, place)) + "\n")
            other.stdin.flush()

        share = host.readers[0].share
        share._boards = [Place(*map(int, other.stdout.readline().split()))]
        tell(host.boards[0].place)
        assert other.stdout.readline() == "\n"
        host.read(0)
        tell(share.told())
        assert other.stdout.readline().split() == ["0", "True", "True"]
