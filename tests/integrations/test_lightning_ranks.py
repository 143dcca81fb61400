"""Lightning with several ranks: real processes, started by Lightning itself and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.training import record
from tests.long_cases import long

pytestmark = pytest.mark.timeout(800)  # several starts of several processes each

HELD_AFTER = 4  # see lightning_example_that_waits.py
ROOT = Path(__file__).parents[2]
LIMIT_S = 250.0


def rows(tmp_path, ranks, system, stops):
    """What `benchmarks.exactness` says of so many ranks."""
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.exactness", "--framework", "lightning"]
    command += ["--ranks", str(ranks), "--workers", "0", "--stops", stops]
    command += ["--systems", system, "--json", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=LIMIT_S)
    return json.loads(out.read_text())


@pytest.mark.parametrize("system", [*long("trainckpt"), "trainckpt FSDP2"])
def test_three_ranks_that_stop_inside_a_window_resume_bitwise_under_ddp_and_fsdp2(tmp_path, system):
    """With DDP two ranks do so below, and three in tests/integrations/test_accelerate.py."""
    [row] = rows(tmp_path, 3, system, "18")
    assert row["system"] == system
    assert row["wrong_stops"] == []
    assert row["losses_equal"] == row["samples_equal"] == row["resumed"] == 3 * 46


class Example:
    """The example under Lightning's own launcher."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.command = [
            sys.executable,
            str(ROOT / "tests/integrations/lightning_example_that_waits.py"),
            "--run",
            str(folder / "run"),
            "--trace",
            str(folder / "trace"),
            "--parallel",
            "ddp",
            "--devices",
            "2",
            "--steps",
            "8",
            "--accumulate",
            "3",
            "--workers",
            "1",
            "--save-every",
            "100",
        ]

    def train(self, stop=False):
        """Run it; `stop`: it waits for a SIGTERM, which rank 0 gets. The exit code."""
        hold, until = self.folder / "hold", time.monotonic() + LIMIT_S
        if stop:
            hold.touch()
        process = subprocess.Popen(self.command, start_new_session=True)
        try:
            while stop and self.lines(1) < HELD_AFTER:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            if stop:
                process.send_signal(signal.SIGTERM)
            return process.wait(LIMIT_S)
        finally:
            hold.unlink(missing_ok=True)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def lines(self, rank):
        file = self.folder / "trace" / f"rank{rank}.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def trace(self):
        names = ("rank0.jsonl", "rank1.jsonl", "final0.json", "final1.json")
        return {name: (self.folder / "trace" / name).read_bytes() for name in names}


def test_the_example_under_lightnings_own_launcher(tmp_path):
    straight, stopped = Example(tmp_path / "straight"), Example(tmp_path / "stopped")
    assert straight.train() == 0
    assert stopped.train(stop=True) == 75
    assert stopped.lines(0) == stopped.lines(1) == HELD_AFTER
    outcome = record(stopped.folder / "run", 1)["outcome"]
    assert (outcome["outcome"], outcome["lost_micro_batches"]) == ("stopped", 0)
    assert stopped.train() == 0
    assert record(stopped.folder / "run", 2)["outcome"]["outcome"] == "finished"
    assert stopped.trace() == straight.trace()
