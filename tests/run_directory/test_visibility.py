"""Hosts write files for each other, to see whether they share one directory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.chaos import late_disk
from tests.faults import dead_mount
from trainckpt.ranks import World
from trainckpt.run_directory import validate
from trainckpt.storage.local import LocalTier


@pytest.mark.parametrize("folder", [validate.PROBE, ""])
def test_a_host_that_still_sees_a_removed_folder_waits_until_it_does_not(tmp_path, folder):
    if reason := dead_mount.why_not():
        pytest.skip(reason)
    server = tmp_path / "server"
    with late_disk.mounted(tmp_path / "host", server):
        tier = LocalTier(tmp_path / "host" / "run")
        tier.make_folder(folder)
        assert (tier.root / folder).is_dir()  # the client keeps this answer
        (server / "run" / folder).rmdir()  # as another host does at the end of its look
        (server / "run").mkdir(exist_ok=True)  # or as a run directory comes back from a backup
        channel = SimpleNamespace(world=World(0, 1, 0, "host"))
        probe = validate._VisibilityProbe(tier, channel, [], [0], writer=0)
        token = probe._write([0])
        assert (server / "run" / validate.PROBE / token).exists()
