"""Keeping again what a run began from gives way to whatever is newer, and breaks none of it."""

from __future__ import annotations

import shutil

import pytest

from tests.lifecycle.training import crashed, usable
from trainckpt.errors import NoAgreement
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.saving.domains import on_this_host
from trainckpt.lifecycle.saving.kept_again import StoredSnapshot
from trainckpt.lifecycle.saving.protection import Unprotected
from trainckpt.ranks.channel import Alone
from trainckpt.ranks.world import World
from trainckpt.snapshot import attempts
from trainckpt.tiers import kept
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import MemoryPlace

CRASH_AT = 9


@pytest.fixture
def stored(tmp_path):
    """A run that crashed, of which memory holds nothing any more, and its newest snapshot."""
    crashed(tmp_path, CRASH_AT, epochs=3)
    if (memory := MemoryPlace.found(str(tmp_path))) is not None:
        shutil.rmtree(memory.root)
    tier, name = LocalTier(tmp_path), SnapshotName.parse(usable(tmp_path)[-1])
    return StoredSnapshot([tier], attempts.run_id(tier), name, 0, lambda _: True)


def never():
    raise NoAgreement("a newer snapshot is to be kept")


def test_a_file_is_not_fetched_any_further_once_something_newer_comes(stored, tmp_path):
    manifest = stored.manifest()
    with pytest.raises(NoAgreement, match="newer"), stored.file(manifest, never):
        pass
    assert not kept.files(MemoryPlace.of(str(tmp_path)), stored.name.folder)
    with stored.file(manifest, lambda: None) as data:
        assert len(data) == manifest.files[0].num_bytes


def test_what_fails_late_takes_nothing_from_a_snapshot_that_is_newer(stored, tmp_path):
    """A last save may have put its manifest there meanwhile, and lies nowhere else."""
    world = World(0, 1, 0, "host")
    protection = on_this_host(Alone(world), str(tmp_path), ["host"])
    memory = MemoryPlace.of(str(tmp_path))
    newer = SnapshotName(9, 9, 9, 0).folder
    kept.write_manifest(memory, newer, b"{}")
    shutil.rmtree(tmp_path / stored.name.folder)  # so it fails
    protection.supersede(over=False)
    with pytest.raises(Unprotected):
        protection.protect_again(stored)
    assert kept.MANIFEST in kept.files(memory, newer)
    protection.supersede(over=True)
    with pytest.raises(Unprotected):
        protection.protect_again(stored)
    assert not kept.files(memory, newer)
    assert not protection.is_cut_off
