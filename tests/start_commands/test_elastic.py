"""torchrun with a number of agents that changes: each start has one name on all of its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.limits import HANG_S

SAMPLES = 240
SCRIPT = str(Path(__file__).with_name("elastic.py"))


class Agents:
    """Agents of one elastic launch, on one host."""

    def __init__(self, folder):
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir()
        self._port = launch.free_port()
        self._started = []

    def start(self, *, is_host):
        """One more agent, in a process group of its own."""
        conf = f"is_host={int(is_host)},last_call_timeout=2,join_timeout={HANG_S:g}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "x"),
            *("--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-conf", conf),
            *("--", SCRIPT, str(self.folder / "run"), str(self.trace), str(SAMPLES)),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"agent{len(self._started)}").open("wb") as said:
            agent = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, start_new_session=True
            )
        self._started.append(agent)
        return agent

    def lines(self, attempt, rank):
        """What a rank of an attempt has written."""
        file = self.trace / f"{attempt}.{rank}"
        if not file.exists():
            return []
        return [
            json.loads(line)
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def until(self, attempt, lines):
        """Wait for so many lines of an attempt's rank 0."""
        end_s = time.monotonic() + HANG_S
        while len(self.lines(attempt, 0)) < lines:
            assert time.monotonic() < end_s, self.said()
            time.sleep(0.05)

    def said(self):
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("agent?")))

    def end(self):
        for agent in self._started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


@pytest.fixture
def agents(tmp_path):
    found = Agents(tmp_path)
    yield found
    found.end()


@pytest.mark.long
def test_two_agents_one_and_two_again_train_every_sample_once(agents):
    first, second = agents.start(is_host=True), agents.start(is_host=False)
    agents.until(1, 12)
    ranks = json.loads((agents.folder / "run/attempts/1.json").read_text())["pids"]
    (worker,) = [pid for pid in ranks if _parent(pid) == second.pid]  # in a session of its own
    os.killpg(second.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    agents.until(2, 12)
    third = agents.start(is_host=False)
    agents.until(3, 4)
    assert [first.wait(HANG_S), third.wait(HANG_S)] == [0, 0], agents.said()
    starts = [
        agents.lines(attempt, rank)[0] for attempt, rank in ((1, 0), (1, 1), (2, 0), (3, 0), (3, 1))
    ]
    assert [start["world"] for start in starts] == [2, 2, 1, 2, 2]
    assert {start["restarts"] for start in starts[3:]} == {0, 1}  # what names were made of
    trained = []
    for attempt in (1, 2, 3):
        ends = [agents.lines(later, 0)[0]["step"] for later in range(attempt + 1, 4)]
        until = min(ends, default=SAMPLES)
        lines = [line for rank in (0, 1) for line in agents.lines(attempt, rank)[1:]]
        trained += [sample for step, sample in lines if step < until]
    assert set(trained) == set(range(SAMPLES))
    assert len(trained) <= SAMPLES + 1  # padding, at the end


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
