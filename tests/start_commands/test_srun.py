"""`srun python SCRIPT`: every rank a task of its own, told by Slurm's variables alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import launch
from tests.start_commands.started import Forks, Run, ended, sigterm, stop

SCRIPT = str(Path(__file__).with_name("slurm_tasks.py"))


@pytest.fixture
def srun(server, log):
    """The tasks of one step of a job that was started again so many times."""

    def start(run: Run, restarts: int) -> Forks:
        common = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(launch.free_port()),
            "TRAINCKPT_REQUEUE": "never",  # no Slurm knows this job: it would be lingered for
        }
        if restarts:
            common["SLURM_RESTART_COUNT"] = str(restarts)
        tasks = [{**common, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
        return Forks(server, SCRIPT, run.argv, log(), tasks)

    return start


def test_every_task_ends_with_75_and_a_requeued_job_goes_on_to_the_same_bit(
    straight, srun, tmp_path
):
    """SIGTERM to all tasks, as Slurm sends it; to one of them; then to the end."""
    run = Run(tmp_path / "r", 2)

    first = srun(run, 0)
    assert stop(first, run, lambda: sigterm(*first.pids)) == [75, 75], first.said()
    run.assert_stopped(1)
    assert run.record(1).facts["launch"]["kind"] == "srun"
    assert "only Slurm restarts failed ranks" in first.said()

    second = srun(run, 1)
    assert stop(second, run, lambda: sigterm(second.pids[1])) == [75, 75], second.said()
    run.assert_stopped(2)

    last = srun(run, 2)
    assert ended(last) == [0, 0], last.said()
    run.assert_exact(straight(2))


def test_a_requeued_job_whose_place_is_mistyped_ends_with_66_on_every_task(srun, tmp_path):
    """It does not start from nothing, and creates nothing."""
    mistyped = Run(tmp_path / "mistyped", 2)
    job = srun(mistyped, 1)
    assert ended(job) == [66, 66], job.said()
    assert "SLURM_RESTART_COUNT=1 says this is a restart" in job.said()
    assert not Path(mistyped.place).exists()
    assert mistyped.trained() == 0
