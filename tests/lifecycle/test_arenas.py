"""Arenas: which memory is chosen, and that nothing happens to what a save lies in."""

from __future__ import annotations

import pytest

from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.deciding.arena_choice import (
    HELD,
    OWN,
    PRIVATE,
    SHARED,
    STREAMED,
    Room,
    choose,
)
from trainckpt.lifecycle.saving.arenas import Arenas
from trainckpt.tiers import memory
from trainckpt.tiers.memory import MemoryPlace

MB = 1 << 20


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        (Room(None, shared=True, shared_bytes=20), (SHARED, 2)),
        (Room(20, shared=True, shared_bytes=20, beyond=HELD), (SHARED, 2)),
        (Room(20, shared=True, shared_bytes=19, beyond=HELD), (HELD, 2)),
        (Room(20, shared=True, shared_bytes=19, beyond=OWN), (SHARED, 1)),
        (Room(20, shared=True, shared_bytes=9, beyond=OWN), (OWN, 2)),
        (Room(19, shared=True, shared_bytes=10, beyond=HELD), (SHARED, 1)),
        (Room(19, shared=True, shared_bytes=9, beyond=HELD), (HELD, 1)),
        (Room(19, shared=True, shared_bytes=9, beyond=OWN), (OWN, 1)),
        (Room(19, shared=True, shared_bytes=9), (PRIVATE, 1)),
        (Room(20, shared=False, shared_bytes=50), (PRIVATE, 1)),
        (Room(None, shared=True, shared_bytes=9, beyond=HELD), (PRIVATE, 1)),
        (Room(9, shared=True, shared_bytes=50, beyond=HELD), (STREAMED, 0)),
    ],
)
def test_for_files_of_ten_bytes(room, chosen):
    """Where nobody knows a limit, only a full tmpfs says no: nothing is taken beside it then."""
    assert choose(room, 10) == chosen


def test_memory_that_a_save_lies_in_is_not_made_ready_for_the_next(tmp_path):
    """Made smaller under its mapping, it would end the process that still reads it (SIGBUS)."""
    arenas = Arenas(str(tmp_path), 0, [0])
    given = arenas.memory(12 * MB)
    given[:] = b"x" * len(given)
    arenas.prepare(MB)
    assert arenas.are_ready  # waits for what was begun
    assert bytes(given) == b"x" * len(given)
    del given
    arenas.close(keep=False)


def test_a_run_that_is_finished_gives_back_what_it_had_before_it_took_another_kind(
    tmp_path, monkeypatch
):
    """It grew, and others had filled /dev/shm meanwhile."""
    arenas, place = Arenas(str(tmp_path), 0, [0]), MemoryPlace.of(str(tmp_path))
    for number in range(1, 3):
        arenas.memory(MB)
        arenas.publish(SnapshotName.parse(f"s{number}~1.{number}"), "rank00000.safetensors")
    monkeypatch.setattr(memory, "_ROOM_BYTES", 1 << 60)
    arenas.memory(8 * MB)
    arenas.publish(SnapshotName.parse("s3~1.3"), "rank00000.safetensors")
    assert place.folders() == ["snapshots/s1~1.1", "snapshots/s2~1.2"]
    arenas.close(keep=False)
    assert not place.root.exists()


def test_memory_of_the_kind_before_goes_once_the_newest_snapshot_stands_in_the_other(
    tmp_path, monkeypatch
):
    """Not sooner: a save that others do not keep leaves the one before the newest."""
    arenas, place = Arenas(str(tmp_path), 0, [0]), MemoryPlace.of(str(tmp_path))
    arenas.memory(MB)
    arenas.publish(SnapshotName.parse("s1~1.1"), "rank00000.safetensors")
    before = arenas.newest
    monkeypatch.setattr(memory, "_ROOM_BYTES", 1 << 60)
    arenas.memory(8 * MB)
    arenas.publish(SnapshotName.parse("s2~1.2"), "rank00000.safetensors")
    arenas.newest = before
    arenas.memory(8 * MB)
    assert place.folders() == ["snapshots/s1~1.1"]
    arenas.publish(SnapshotName.parse("s3~1.3"), "rank00000.safetensors")
    arenas.memory(8 * MB)
    assert place.folders() == []
    assert place.left_by(0).tmpfs == 0
    arenas.close(keep=False)
    assert not place.root.exists()
