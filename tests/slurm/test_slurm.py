"""A real Slurm stops jobs in its own ways; each is saved, queued again, and ends as if not stopped.

The jobs are the scripts of `configs/slurm/`, with the example as their command.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.daemons import free_ports, wait_for
from tests.slurm.cluster import NODES
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "slurm" / "job.py")
LIMIT_S = 240.0  # for anything Slurm or a job does
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")

pytestmark = pytest.mark.timeout(
    900
)  # Slurm's own timers, on a busy machine; each wait has LIMIT_S


class Job:
    """A job that trains one run."""

    def __init__(self, cluster, run: Run, *sbatch: str, **variables: str) -> None:
        self.cluster, self.run = cluster, run
        (run.folder / SLOW).touch()
        environment = {
            **launch.environment(),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "MASTER_PORT": str(free_ports(1)[0]),
            **variables,
        }
        out = run.folder / "out"
        words = (
            "sbatch",
            "--parsable",
            f"--output={out}",
            "--open-mode=append",
            *sbatch,
            SCRIPT,
            *run.argv,
        )
        said = cluster.command(*words, cwd=run.folder, variables=environment)
        self.id = said.strip()

    def fields(self) -> dict[str, str]:
        return self.cluster.job(self.id)

    def nodes(self) -> list[str]:
        """Names of the nodes that it has, or had last."""
        names = self.fields()["NodeList"]
        return self.cluster.command("scontrol", "show", "hostnames", names).split()

    def said(self) -> str:
        out = self.run.folder / "out"
        text = out.read_text(errors="replace") if out.exists() else ""
        return f"{self.cluster.try_('scontrol', 'show', 'job', self.id)}\n{text}"

    def until_trained(self, more: int) -> None:
        wanted = self.run.trained() + more

        def trained() -> bool:
            assert self.fields()["JobState"] not in ENDED, self.said()
            return self.run.trained() >= wanted

        wait_for(trained, LIMIT_S, self.said)

    def until_stopped(self, attempt: int) -> None:
        """The attempt has ended by a stop; from then on the run is as fast as it can."""

        def stopped() -> bool:
            return self.records() >= attempt and self.run.record(attempt).outcome is not None

        wait_for(stopped, LIMIT_S, self.said)
        (self.run.folder / SLOW).unlink(missing_ok=True)
        self.run.assert_stopped(attempt)

    def until_finished(self) -> None:
        wait_for(lambda: self.fields()["JobState"] in ENDED, LIMIT_S, self.said)
        assert self.fields()["JobState"] == "COMPLETED", self.said()

    def records(self) -> int:
        folder = Path(self.run.place) / "attempts"
        return len(list(folder.glob("*.json"))) if folder.exists() else 0


def config(name: str) -> str:
    return str(ROOT / "configs" / "slurm" / name)


def direct(run: Run) -> str:
    """A job script whose tasks are the ranks themselves: a third of the processes to start."""
    ranks = "RANK=$SLURM_PROCID LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 " * (run.ranks > 1)
    path = run.folder / "direct.sbatch"
    path.write_text(f'#!/bin/bash\nsrun bash -c \'{ranks}exec "$0" "$@"\' {sys.executable} "$@"\n')
    return str(path)


def test_a_preempted_job_saves_is_queued_again_and_goes_on_to_the_same_bit(
    cluster, straight, tmp_path
):
    """A job of a higher partition wants two of three nodes; the low one leaves before it must."""
    run = Run(tmp_path / "r", 2)
    job = Job(cluster, run, "--nodes=2", "--ntasks=2", direct(run))
    job.until_trained(5)
    high = cluster.submit("srun true", "-p", "high", "-N2", "-n2", cwd=tmp_path)
    job.until_stopped(1)
    assert run.record(1).outcome["reason"] == "SIGTERM"
    job.until_finished()
    assert job.fields()["Restarts"] == "1"
    assert cluster.job(high)["JobState"] == "COMPLETED"
    run.assert_exact(straight(2))


@pytest.fixture
def undrained(cluster):
    """Bring back a node that a test drained."""
    yield
    for node in NODES:
        cluster.try_("scontrol", "update", f"NodeName={node}", "State=RESUME")
    wait_for(lambda: cluster.idle() == set(NODES), LIMIT_S, cluster.said)


@pytest.mark.long
@pytest.mark.usefixtures("undrained")
def test_a_job_of_two_nodes_is_preempted_loses_a_node_and_goes_on_with_others(
    cluster, straight, tmp_path
):
    """Each node has its own `trainckpt run`; a node of the first start is drained meanwhile."""
    run = Run(tmp_path / "r", 2)
    job = Job(cluster, run, config("preemptible.sbatch"))
    job.until_trained(5)
    before = job.nodes()
    high = cluster.submit("srun true", "-p", "high", "-N2", "-n2", cwd=tmp_path)
    job.until_stopped(1)
    cluster.command("scontrol", "update", f"NodeName={before[0]}", "State=DRAIN", "Reason=test")
    job.until_finished()
    assert job.fields()["Restarts"] == "1"
    assert len(before) == len(job.nodes()) == 2
    assert before[0] not in job.nodes()
    assert cluster.job(high)["JobState"] == "COMPLETED"
    run.assert_exact(straight(2))


SLOW_TO_BEGIN = """
import os, pathlib, sys, time
up, place = map(pathlib.Path, sys.argv[1:])
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    up.touch()
    time.sleep(600)
if os.environ["SLURM_PROCID"] != "0":
    sys.exit()
import torch, trainckpt
with trainckpt.Checkpointer(place, model=torch.nn.Linear(2, 2)) as ckpt:
    ckpt.boundary()
"""


@pytest.mark.long
def test_a_job_that_is_preempted_before_its_ranks_have_begun_begins_in_its_next_start(
    cluster, tmp_path
):
    """Nobody has saved anything, or listens, but the supervisor; leaving would end the job. That
    there is no run then is no error."""
    script, up, place = tmp_path / "script.py", tmp_path / "up", tmp_path / "run"
    script.write_text(SLOW_TO_BEGIN)
    job_script = tmp_path / "job.sbatch"
    job_script.write_text(f"#!/bin/bash\nsrun trainckpt run --nproc 1 -- {script} {up} {place}\n")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    said = cluster.command(
        "sbatch",
        "--parsable",
        f"--output={tmp_path / 'out'}",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks=2",
        "--comment=sweep LR=3e-4 keep StdErr=/x",
        str(job_script),
        variables={**launch.environment(), "PATH": path},
    )
    job = said.strip()
    out = tmp_path / "out"
    wait_for(up.exists, LIMIT_S, lambda: cluster.try_("scontrol", "show", "job", job))
    cluster.submit("srun true", "-p", "high", "-N2", "-n2", cwd=tmp_path)

    wait_for(lambda: cluster.job(job)["JobState"] in ENDED, LIMIT_S, cluster.said)
    said = out.read_text(errors="replace")
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("COMPLETED", "1"), said
    assert "SLURM_RESTART_COUNT=1, but Slurm was told that this command was stopped before" in said
    shown = cluster.try_("scontrol", "show", "job", job)
    [comment] = [line for line in shown.splitlines() if line.startswith("   Comment=")]
    assert comment.rstrip() == "   Comment=sweep LR=3e-4 keep StdErr=/x", (
        "as it was, without our note"
    )
    assert "attempt 1: begins at step 0" in said


def test_a_requeue_by_somebody_else_is_left_to_slurm(cluster, straight, tmp_path):
    """The job is queued again already when its processes hear of it."""
    run = Run(tmp_path / "r", 1)
    job = Job(cluster, run, config("job.sbatch"))
    job.until_trained(2)
    cluster.command("scontrol", "requeue", job.id)
    job.until_stopped(1)
    job.until_finished()
    assert job.fields()["Restarts"] == "1"
    assert "is queued again" not in job.said()
    run.assert_exact(straight(1))


@pytest.mark.long
def test_a_task_of_an_array_near_its_time_limit_is_queued_again_by_itself(
    cluster, straight, tmp_path
):
    """`--signal`, and a limit that is near as soon as the task has trained a little."""
    run = Run(tmp_path / "r", 1)
    job = Job(cluster, run, "--array=7", "--time=60", "--signal=USR1@280", direct(run))
    task = f"{job.id}_7"
    job.until_trained(2)
    cluster.command("scontrol", "update", f"JobId={task}", "TimeLimit=5")
    job.until_stopped(1)
    cluster.command("scontrol", "update", f"JobId={task}", "TimeLimit=600")
    assert run.record(1).outcome["reason"] == "SIGUSR1"
    job.until_finished()
    assert f"Slurm job {task} is queued again" in job.said()
    run.assert_exact(straight(1))


@pytest.mark.long
def test_the_end_of_a_job_is_known_without_a_signal(cluster, straight, tmp_path):
    """Five minutes in all, a grace of nearly as much: the stop is due when the job has begun."""
    run = Run(tmp_path / "r", 1)
    job = Job(cluster, run, "--time=5", direct(run), TRAINCKPT_GRACE="298 s")
    job.until_stopped(1)
    cluster.command("scontrol", "update", f"JobId={job.id}", "TimeLimit=600")
    assert run.record(1).outcome["reason"] == "wall time"
    job.until_finished()
    assert f"Slurm job {job.id} is queued again" in job.said()
    run.assert_exact(straight(1))


def test_slurm_takes_each_script_of_ours(cluster, tmp_path):
    scripts = sorted((ROOT / "configs" / "slurm").iterdir())
    assert [path.name for path in scripts] == ["array.sbatch", "job.sbatch", "preemptible.sbatch"]
    for script in scripts:
        cluster.command("sbatch", "--test-only", str(script), "train.py", cwd=tmp_path)
