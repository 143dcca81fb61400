"""Arenas: which memory is chosen, and that nothing happens to what a save lies in."""

from __future__ import annotations

import pytest
import torch

from tests.state.slow_device import SlowDevice
from trainckpt import Checkpointer
from trainckpt.format.names import SnapshotName
from trainckpt.save.arenas import OWN, PRIVATE, SHARED, STREAMED, Arenas, MemorySpace, choose
from trainckpt.state import device_copy
from trainckpt.storage import shared_memory
from trainckpt.storage.shared_memory import SharedMemoryDir

MB = 1 << 20


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        (MemorySpace(None, shared=True, shared_bytes=20), (SHARED, 2)),
        (MemorySpace(20, shared=True, shared_bytes=20, beyond=True), (SHARED, 2)),
        (MemorySpace(20, shared=True, shared_bytes=19, beyond=True), (SHARED, 1)),
        (MemorySpace(20, shared=True, shared_bytes=9, beyond=True), (OWN, 2)),
        (MemorySpace(19, shared=True, shared_bytes=10, beyond=True), (SHARED, 1)),
        (MemorySpace(19, shared=True, shared_bytes=9, beyond=True), (OWN, 1)),
        (MemorySpace(19, shared=True, shared_bytes=9), (PRIVATE, 1)),
        (MemorySpace(20, shared=False, shared_bytes=50), (PRIVATE, 1)),
        (MemorySpace(None, shared=True, shared_bytes=9, beyond=True), (PRIVATE, 1)),
        (MemorySpace(9, shared=True, shared_bytes=50, beyond=True), (STREAMED, 0)),
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
    arenas, place = Arenas(str(tmp_path), 0, [0]), SharedMemoryDir.of(str(tmp_path))
    for number in range(1, 3):
        arenas.memory(MB)
        arenas.publish(SnapshotName.parse(f"s{number}~1.{number}"), "rank00000.safetensors")
    monkeypatch.setattr(shared_memory, "_ROOM_BYTES", 1 << 60)
    arenas.memory(8 * MB)
    arenas.publish(SnapshotName.parse("s3~1.3"), "rank00000.safetensors")
    assert place.folders() == ["snapshots/s1~1.1", "snapshots/s2~1.2"]
    arenas.close(keep=False)
    assert not place.root.exists()


def test_a_run_that_is_finished_gives_back_what_an_earlier_attempt_left(tmp_path):
    """Such as copies of another host's files, which no rank has opened since."""
    place = SharedMemoryDir.of(str(tmp_path))
    left = place.open_arena(place.root / "arenas" / "copy00001.0")
    left.reserve(MB)
    left.publish("snapshots/s7~1.7", "rank00001.safetensors")
    left.close()
    assert place.folders() == ["snapshots/s7~1.7"]
    for rank in (1, 0):
        arenas = Arenas(str(tmp_path), rank, [0, 1])
        arenas.memory(MB)
        arenas.close(keep=False)
        assert place.root.exists() == (rank == 1)


def test_memory_of_the_kind_before_goes_once_the_newest_snapshot_stands_in_the_other(
    tmp_path, monkeypatch
):
    """Not sooner: a save that others do not keep leaves the one before the newest."""
    arenas, place = Arenas(str(tmp_path), 0, [0]), SharedMemoryDir.of(str(tmp_path))
    arenas.memory(MB)
    arenas.publish(SnapshotName.parse("s1~1.1"), "rank00000.safetensors")
    before = arenas.newest
    monkeypatch.setattr(shared_memory, "_ROOM_BYTES", 1 << 60)
    arenas.memory(8 * MB)
    arenas.publish(SnapshotName.parse("s2~1.2"), "rank00000.safetensors")
    arenas.newest = before
    arenas.memory(8 * MB)
    assert place.folders() == ["snapshots/s1~1.1"]
    arenas.publish(SnapshotName.parse("s3~1.3"), "rank00000.safetensors")
    arenas.memory(8 * MB)
    assert place.folders() == []
    assert place.left_by(0) == 0
    arenas.close(keep=False)
    assert not place.root.exists()


@pytest.mark.parametrize("shared", [True, False])
def test_files_that_grow_and_shrink_a_little_lie_in_memory_that_is_locked_once(
    tmp_path, monkeypatch, shared
):
    """To lock a gigabyte for a GPU takes a quarter of a second, while training waits."""
    device, kb = SlowDevice(), 1 << 10
    monkeypatch.setattr(device_copy, "CudaCalls", lambda: device)
    if not shared:
        monkeypatch.setenv(shared_memory.ROOT_VARIABLE, shared_memory.NONE)
        monkeypatch.setattr("trainckpt.save.arenas.has_memfd", lambda: False)
    arenas = Arenas(str(tmp_path), 0, [0])
    arenas.device_copier.use([torch.ones(1)])
    sizes = [6 * MB, 6 * MB, 6 * MB + kb, 6 * MB - kb, 6 * MB + 2 * kb, 5 * MB]
    for number, size in enumerate(sizes, 1):
        given = arenas.memory(size)
        assert len(given) == size
        given[:] = bytes([number]) * size
        arenas.publish(SnapshotName.parse(f"s{number}~1.{number}"), "rank00000.safetensors")
        assert len(device.locked) == device.num_locked
    assert sorted(device.locked.values()) == ([MB, 6 * MB, 6 * MB] if shared else [10 * MB])
    del given
    arenas.close(keep=False)
    assert device.locked == {}


def test_an_arena_that_grows_stays_where_it_is_and_its_reader_has_what_was_saved(tmp_path):
    arenas, place = Arenas(str(tmp_path), 0, [0]), SharedMemoryDir.of(str(tmp_path))
    arena = place.arena(0, 7)
    starts = []
    for size in (3 * MB, 5 * MB, 4 * MB, 6 * MB):
        arena.reserve(size, spare=True)
        starts.append(torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr())
        arena.memory[:] = bytes([size // MB]) * size
    assert len(set(starts)) == 1
    arena.reserve(MB, spare=True)  # most of it is of no use now
    assert arena.capacity_bytes == len(arena.reserved) == MB
    arena.reserve(2 * MB, spare=True)
    arena.reserve(MB + 1, spare=True)
    arena.memory[:] = b"x" * (MB + 1)
    arena.publish("snapshots/s1~1.1", "rank00007.safetensors")
    assert arena.capacity_bytes == 2 * MB
    arena.close()
    found = place.held("snapshots/s1~1.1", "rank00007.safetensors", MB + 1)
    assert bytes(found.data) == b"x" * (MB + 1)
    found.close()
    assert place.held("snapshots/s1~1.1", "rank00007.safetensors", 2 * MB + 1) is None
    arenas.close(keep=False)
    place.remove()


def test_saves_that_fall_amid_windows_lie_in_memory_that_was_locked_before_the_first(
    tmp_path, monkeypatch
):
    device = SlowDevice()
    monkeypatch.setattr(device_copy, "CudaCalls", lambda: device)
    model = torch.nn.Linear(1 << 10, 1 << 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sizes = set()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every="1 h") as ckpt:
        for number in range(10):
            if number >= 6:
                ckpt.save()
            ckpt.boundary()
            model(torch.ones(1, 1 << 10)).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            if number >= 6:
                sizes.add(len(ckpt._attempt.saver.arenas._filled.memory) // MB)
                assert sorted(device.locked.values()) == 2 * [17 * MB]
    assert sizes == {8, 12}
    assert device.num_locked == 2
