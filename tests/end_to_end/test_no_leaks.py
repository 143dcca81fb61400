"""Saves one after another leave nothing behind that grows with their number.

python -m tests.end_to_end.many_saves --saves 500      the same, for longer
"""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.end_to_end.many_saves import BESIDE_FROM_BYTES, KINDS, SHARED, by_turns, save_often
from trainckpt.save import copying
from trainckpt.snapshot import writer_client
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE, SharedMemoryDir

SAVES, WARM_UP = 60, 20
SHARD_BYTES = 1_500_000  # at least; of one that stayed with each save nothing could be overlooked
# Whatever a Python process takes and gives back now and then; threads that are just ending.
MAY_GROW = {"resident bytes": 8 << 20, "threads": 3, "mappings": 16}


@pytest.fixture
def place():
    """Of a run, where it costs nothing to wait for stable storage."""
    with tempfile.TemporaryDirectory(dir=os.environ[ROOT_VARIABLE]) as folder:
        yield folder


@pytest.mark.parametrize("kind", KINDS)
def test_saves_leave_no_memory_descriptors_threads_or_files_behind(place, monkeypatch, kind):
    if kind not in SHARED:
        monkeypatch.setenv(ROOT_VARIABLE, NONE)
    from_bytes = BESIDE_FROM_BYTES if kind == "beside" else 1 << 40
    monkeypatch.setattr(writer_client, "FROM_BYTES", from_bytes)
    monkeypatch.setattr(copying.CopyChoice, "next", by_turns())
    first, last = save_often(place, KINDS[kind], SAVES, warm_up=WARM_UP)
    assert last["saves"] - first["saves"] == SAVES - WARM_UP
    assert first["memory bytes"] > 2 * SHARD_BYTES or kind not in SHARED
    assert (last["processes"] > 0) == (kind == "beside")
    grown = {k: (first[k], last[k]) for k in last if last[k] > first[k] + MAY_GROW.get(k, 0)}
    assert grown.keys() == {"saves"}
    assert SharedMemoryDir.found(place) is None
