"""What a killed run leaves in shared memory is given back, wherever it was killed.

python -m tests.end_to_end.killed FOLDER --cases 100      the same at more instants
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.killed import MAX_ARENAS

ROOT = Path(__file__).parents[2]
CASES = 6  # each way on each number of ranks


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    command = [sys.executable, "-m", "tests.end_to_end.killed", folder, "--cases", str(CASES)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_runs_were_killed_and_left_no_more_than_their_arenas(cases):
    assert [case["code"] for case in cases].count(-signal.SIGKILL) > len(cases) // 2
    assert {case["world"] for case in cases} == {1, 2}
    assert any(case["before"]["bytes"] > 0 for case in cases)
    assert all(len(c["before"]["arenas"]) <= c["world"] * MAX_ARENAS for c in cases)


@pytest.mark.parametrize("way", ["attempt", "prune", "gone"])
def test_it_is_given_back_by(cases, way):
    """The next attempt; `trainckpt prune`; any run, if its own place is gone."""
    ours = [case for case in cases if case["way"] == way]
    assert ours
    for case in ours:
        assert case["code_after"] == 0, case
        assert case["exact"], case
        assert case["after"] == {"there": False, "arenas": [], "bytes": 0}, case
