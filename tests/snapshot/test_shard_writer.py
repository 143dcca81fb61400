"""Save: a place that hangs before it asks for a byte holds up no more than the save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading
from tests.snapshot.test_sealed import Shard
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.snapshot.encrypted_writer import SnapshotKey
from trainckpt.storage.local import Disk
from trainckpt.storage.local import LocalTier

hung = threading.Event()

class Hanging(Disk):
    def make_folder(self, path):
        if path.name == "s1~1.1":
            hung.set()
            threading.Event().wait()
        super().make_folder(path)

tier, name = LocalTier(sys.argv[1], Hanging()), SnapshotName.parse("s1~1.1")
tier.create("run.json", b"{}")
snapshot_key = SnapshotKey("run", bytes(32)) if sys.argv[2] == "sealed" else None
arguments = (tier, name, 0, Shard(bytes(100_000), 8192))
threading.Thread(
    target=write_shard, args=arguments, kwargs={"snapshot_key": snapshot_key}, daemon=True
).start()
hung.wait()
raise RuntimeError("of the script")
"""


@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_a_script_that_fails_ends_while_its_place_hangs(tmp_path, kind):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run", kind],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.endswith("RuntimeError: of the script\n")
