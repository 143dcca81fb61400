"""`trainckpt run`: 75 for every stop, whoever was sent the signal."""

from __future__ import annotations

import os
import signal

import pytest

from tests.launchers.started import EXAMPLE, ROOT, Forks, Run, ended, sigterm, stop

MAIN = str(ROOT / "src" / "trainckpt" / "cli" / "main.py")


@pytest.fixture
def supervised(server, log):
    """The command is forked from the warm server; torchrun and its ranks are started afresh."""

    def start(run: Run) -> Forks:
        return Forks(server, MAIN, ["run", "--nproc", "2", "--", EXAMPLE, *run.argv], log())

    return start


def test_trainckpt_run_ends_with_75_for_every_stop_and_goes_on_to_the_same_bit(
    straight, supervised, tmp_path
):
    """SIGTERM to one rank, Ctrl-C; then to the end. (To the supervisor: tests/cli.)"""
    run = Run(tmp_path / "r", 2)

    first = supervised(run)
    assert stop(first, run, lambda: sigterm(run.pids()[0])) == [75], first.said()
    run.assert_stopped(1)
    assert "not started by" not in first.said()

    second = supervised(run)
    assert stop(second, run, lambda: os.kill(second.pid, signal.SIGINT)) == [75], second.said()
    run.assert_stopped(2)
    assert "Traceback" not in first.said() + second.said()

    last = supervised(run)
    assert ended(last) == [0], last.said()
    run.assert_exact(straight(2))
