"""`python SCRIPT`: one process, its own exit code."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.start_commands.started import EXAMPLE, Command, Run, ended, sigterm, stop


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_python_ends_with_75_and_the_same_command_goes_on_to_the_same_bit(
    straight, tmp_path, log, again
):
    """Ctrl-C; `again`: SIGTERM, too; then to the end."""
    run = Run(tmp_path / "r", 1)
    command = [sys.executable, EXAMPLE, *run.argv]

    first = Command(command, log())
    assert stop(first, run, lambda: os.kill(first.pid, signal.SIGINT)) == [75], first.said()
    run.assert_stopped(1)
    assert run.record(1).facts["launch"] == {"kind": "python", "nproc": 1}
    assert "running without a supervisor: no automatic restart" in first.said()

    if again:
        second = Command(command, log())
        assert stop(second, run, lambda: sigterm(second.pid)) == [75], second.said()
        run.assert_stopped(2)

    last = Command(command, log())
    assert ended(last) == [0], last.said()
    assert run.record(2 + again).outcome["outcome"] == "finished"
    run.assert_exact(straight(1))
