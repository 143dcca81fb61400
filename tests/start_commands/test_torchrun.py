"""torchrun alone: its own exit code is 1 for every stop; the attempt's record has the right one."""

from __future__ import annotations

import sys

import pytest

from tests.campaign import launch
from tests.start_commands.started import EXAMPLE, Command, Run, ended, sigterm, stop


def torchrun(run: Run) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(launch.free_port())),
        *("--", EXAMPLE, *run.argv),
    ]


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torchrun_says_1_the_record_says_75_and_it_goes_on_to_the_same_bit(
    straight, tmp_path, log, again
):
    """SIGTERM to torchrun, which passes it to all; `again`: to one rank alone, too; then to the
    end."""
    run = Run(tmp_path / "r", 2)

    first = Command(torchrun(run), log())
    assert stop(first, run, lambda: sigterm(first.pid)) == [1], first.said()
    run.assert_stopped(1)
    assert run.record(1).facts["launch"] == {"kind": "torchrun", "nproc": 2}
    (lost,) = [line for line in first.said().splitlines() if "without a supervisor" in line]
    assert "torchrun returns 1 for every code" in lost

    if again:
        second = Command(torchrun(run), log())
        assert stop(second, run, lambda: sigterm(run.pids()[1])) == [1], second.said()
        run.assert_stopped(2)

    last = Command(torchrun(run), log())
    assert ended(last) == [0], last.said()
    run.assert_exact(straight(2))
