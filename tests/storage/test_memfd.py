"""Memory in no file system: a rank's own."""

from __future__ import annotations

import os

import pytest

from trainckpt.storage import arena
from trainckpt.storage.arena import Own
from trainckpt.storage.shared_memory import SharedMemoryDir

pytestmark = pytest.mark.skipif(not arena.has_memfd(), reason="the system has no memfd")

FOLDER, FILE = "snapshots/s1~1.1", "rank00000.safetensors"
NUM_BYTES = 10_000


def test_no_other_user_may_open_it_and_no_child_inherits_it():
    descriptor = arena.make_memfd()
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_memory_of_a_process_own_has_no_name(tmp_path):
    place = SharedMemoryDir.of(str(tmp_path))
    arena = Own(place)
    arena.reserve(NUM_BYTES)
    arena.memory[:] = b"x" * NUM_BYTES
    arena.publish(FOLDER, FILE)
    assert arena.holds() == [FOLDER]
    assert place.held(FOLDER, FILE) is None
    assert place.folders() == []
    arena.reserve(NUM_BYTES)
    assert arena.holds() == []
    assert not arena.outlives
    descriptor = arena.descriptor
    arena.remove()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    place.remove()
