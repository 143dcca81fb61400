"""Arenas: which memory is chosen, and that nothing happens to what a save lies in."""

from __future__ import annotations

import pytest

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
    memory = arenas.memory(12 * MB)
    memory[:] = b"x" * len(memory)
    arenas.prepare(MB)
    assert arenas.are_ready  # waits for what was begun
    assert bytes(memory) == b"x" * len(memory)
    del memory
    arenas.close(keep=False)
