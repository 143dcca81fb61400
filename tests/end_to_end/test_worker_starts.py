"""Loader workers that are not forked: as exact after a stop, whatever starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.end_to_end.worker_starts import DEFAULT
from tests.limits import HANG_S

SCRIPT = Path(__file__).with_name("worker_starts.py")
LAST, NUM_BATCHES = 5, 16

pytestmark = pytest.mark.long


def train(*arguments):
    """Run the script as a job of its own; return its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        start_new_session=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("start", ["forkserver", "spawn", DEFAULT])
def test_workers_live_through_a_signal_to_their_group_and_go_on_bitwise(tmp_path, start):
    code, said = train(tmp_path / "straight", tmp_path / "straight.trace", start)
    assert code == 0, said
    if start == DEFAULT:  # the reason of tests/versions for this file
        assert f"started by {'forkserver' if sys.version_info >= (3, 14) else 'fork'}\n" in said
    code, said = train(tmp_path / "run", tmp_path / "trace", start, LAST)
    assert code == 75, said
    assert LAST < len((tmp_path / "trace").read_text().splitlines()) < NUM_BATCHES
    code, said = train(tmp_path / "run", tmp_path / "trace", start)
    assert code == 0, said
    assert "this resume is bitwise" in said
    assert (tmp_path / "trace").read_text() == (tmp_path / "straight.trace").read_text()
