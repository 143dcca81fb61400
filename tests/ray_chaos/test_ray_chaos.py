"""Cases of the chaos driver for Ray Train that end as they have to.

python -m tests.ray_chaos --count 20     more of them
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic import trace
from tests.ray_chaos import chaos

pytest.importorskip("ray.train")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
WITHIN_S = 880


@pytest.mark.parametrize(
    ("seed", "verdict"),
    [
        (6, trace.EXACT),  # a node is removed, and a worker killed, and its successor
        (3, trace.SAME_DATA),  # three workers, two
    ],
)
def test_a_storm_of_events_ends_exactly_or_with_every_sample_once(tmp_path, seed, verdict):
    assert chaos.draw(seed).elastic is (verdict == trace.SAME_DATA)
    command = [sys.executable, "-m", "tests.ray_chaos", "--seed-from", str(seed), "--count", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"  {verdict}: " in done.stdout
