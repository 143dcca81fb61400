"""`trainckpt run`: 75 for every stop, whoever was sent the signal."""

from __future__ import annotations

import os
import signal

import pytest

from tests.campaign import launch
from tests.start_commands.started import EXAMPLE, ROOT, Forks, Run, ended, sigterm, stop, wait_for

MAIN = str(ROOT / "src" / "trainckpt" / "cli" / "main.py")


@pytest.fixture
def supervised(server, log):
    """The command is forked from the warm server; torchrun and its ranks are started afresh."""

    def start(run: Run) -> Forks:
        return Forks(server, MAIN, ["run", "--nproc", "2", "--", EXAMPLE, *run.argv], log())

    return start


def kill_alone(supervisor: int, run: Run) -> None:
    """Only the supervisor is killed; its ranks leave because of that."""
    pids = run.pids()
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not any(map(launch.alive, pids)))


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_trainckpt_run_ends_with_75_for_every_stop_and_goes_on_to_the_same_bit(
    straight, supervised, tmp_path, again
):
    """Ctrl-C, SIGKILL to the supervisor alone; `again`: SIGTERM to one rank before; to the end.

    SIGTERM to the supervisor: tests/cli.
    """
    run = Run(tmp_path / "r", 2)

    if again:
        one_rank = supervised(run)
        assert stop(one_rank, run, lambda: sigterm(run.pids()[0])) == [75], one_rank.said()
        run.assert_stopped(1)
        assert "Traceback" not in one_rank.said()

    first = supervised(run)
    assert stop(first, run, lambda: os.kill(first.pid, signal.SIGINT)) == [75], first.said()
    run.assert_stopped(1 + again)
    assert "Traceback" not in first.said()
    assert "without a supervisor" not in first.said()

    second = supervised(run)
    assert stop(second, run, lambda: kill_alone(second.pid, run)) not in ([0], [75]), second.said()
    run.assert_stopped(2 + again)

    last = supervised(run)
    assert ended(last) == [0], last.said()
    run.assert_exact(straight(2))
