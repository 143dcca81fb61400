"""`accelerate launch`: torchrun underneath, so 1 for every stop; the record has the right code.

On a machine without a GPU, `--multi_gpu` is what makes accelerate start several processes: with
`--cpu --num_processes 2` it starts one, unless there is MPI. The Accelerator itself then uses gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.start_commands.started import Command, Forks, Run, ended, sigterm, stop
from tests.start_commands.test_trainckpt_run import MAIN

SCRIPT = str(Path(__file__).with_name("accelerated.py"))


def accelerate(run: Run) -> list[str]:
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(launch.free_port()), SCRIPT, *run.argv),
    ]


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_of_accelerate_stops_and_goes_on_with_it_and_with_trainckpt_resume(
    server, straight, tmp_path, log, again
):
    """SIGTERM to the launcher; `again`: to one rank alone, too; `trainckpt resume` to the end."""
    run = Run(tmp_path / "r", 2)
    home = {"HF_HOME": str(tmp_path / "home")}  # no configuration from outside

    first = Command(accelerate(run), log(), home)
    assert stop(first, run, lambda: sigterm(first.pid)) == [1], first.said()
    run.assert_stopped(1)
    assert run.record(1).facts["launch"] == {"kind": "accelerate", "nproc": 2}
    assert "accelerate launch (through torchrun) returns 1 for every code" in first.said()

    if again:
        second = Command(accelerate(run), log(), home)
        assert stop(second, run, lambda: sigterm(run.pids()[0])) == [1], second.said()
        run.assert_stopped(2)

    last = Forks(server, MAIN, ["resume", run.place], log(), [home])
    assert ended(last) == [0], last.said()
    assert (
        run.record(2 + again).facts["launch"].items() >= {"kind": "accelerate", "nproc": 2}.items()
    )
    run.assert_exact(straight(2))
