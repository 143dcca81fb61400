"""Keeping again what a run began from gives way to whatever is newer, and breaks none of it."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.training import crashed, usable
from trainckpt.errors import NoAgreement
from trainckpt.format.names import SnapshotName
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.replicate.replicator import ReplicationFailed, set_up_local
from trainckpt.replicate.rereplicate import StoredSnapshot
from trainckpt.snapshot import attempt_history
from trainckpt.storage import replica_slots
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

CRASH_AT = 9


@pytest.fixture
def stored(tmp_path):
    """A run that crashed, of which memory holds nothing any more, and its newest snapshot."""
    crashed(tmp_path, CRASH_AT, epochs=3)
    if (memory := SharedMemoryDir.found(str(tmp_path))) is not None:
        shutil.rmtree(memory.root)
    tier, name = LocalTier(tmp_path), SnapshotName.parse(usable(tmp_path)[-1])
    return StoredSnapshot([tier], attempt_history.run_id(tier), name, 0, lambda _: True)


def never():
    raise NoAgreement("a newer snapshot is being replicated")


def test_a_file_is_not_fetched_any_further_once_something_newer_comes(stored, tmp_path):
    manifest = stored.manifest()
    with pytest.raises(NoAgreement, match="newer"), stored.file(manifest, never):
        pass
    assert not replica_slots.files(SharedMemoryDir.of(str(tmp_path)), stored.name.folder)
    with stored.file(manifest, lambda: None) as data:
        assert len(data) == manifest.files[0].num_bytes


def test_what_fails_late_takes_nothing_from_a_snapshot_that_is_newer(stored, tmp_path):
    """A last save may have put its manifest there meanwhile, and lies nowhere else."""
    world = World(0, 1, 0, "host")
    memory = SharedMemoryDir.of(str(tmp_path))
    newer = SnapshotName(9, 9, 9, 0).folder
    replica_slots.write_manifest(memory, newer, b"{}")
    shutil.rmtree(tmp_path / stored.name.folder)  # so it fails
    for over in (False, True):
        protection = set_up_local(local_store(world), str(tmp_path), ["host"])
        protection.supersede(over=over)
        with pytest.raises(ReplicationFailed):
            protection.replicate_stored(stored)
        assert (replica_slots.MANIFEST in replica_slots.files(memory, newer)) != over
    assert not protection.is_cut_off
