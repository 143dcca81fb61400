"""What Kubernetes 1.20 does not know: suspended Jobs, rules for failed pods.

The API server, the scheduler and the pods' ends are those of `test_job.py`; the Job
controller is ours (`newer_controllers.py`), and acts on the manifests of `configs/kubernetes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.newer_controllers import BY_RULE, COMPLETE, Job
from tests.kubernetes.training import (
    LIMIT_S,
    Training,
    manifest,
    pause,
    set_variable,
    train,
)
from tests.slurm.cluster import wait_for
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # each wait has LIMIT_S


@pytest.fixture
def training(cluster, namespace, tmp_path):
    return Training(cluster, namespace, Run(tmp_path / "r", 1))


def submit(training, name: str, change=lambda job: None) -> Job:
    job = manifest(name)
    train(job, training.run)
    change(job)
    return Job(training.cluster.api, training.namespace, job, "train")


def until(controller, training, condition) -> None:
    """The controller works until then."""

    def holds() -> bool:
        controller.step()
        return condition()

    wait_for(holds, LIMIT_S, training.said)


def until_trained(controller, training, more: int) -> None:
    wanted = training.run.trained() + more
    until(controller, training, lambda: training.run.trained() >= wanted)


def until_ended(controller, training) -> str:
    until(controller, training, lambda: controller.ended)
    return controller.ended


def test_a_job_that_kueue_suspends_saves_and_goes_on_when_it_is_admitted_again(training, straight):
    job = submit(training, "kueue.yaml")
    job.step()
    assert training.pods() == []
    job.suspended = False
    until_trained(job, training, 3)
    first = training.running()
    job.suspended = True
    until(job, training, lambda: training.pods() == [])
    training.until_stopped(first, 1)
    job.suspended = False
    assert until_ended(job, training) == COMPLETE, training.said()
    assert (job.pods_made, job.failed) == (2, 0)
    training.run.assert_exact(straight(1))


def test_a_stop_by_itself_is_ignored_and_a_new_pod_goes_on(training, straight):
    job = submit(training, "job.yaml")
    until_trained(job, training, 3)
    first = training.running()
    pause(training.run)
    training.until_stopped(first, 1)
    assert until_ended(job, training) == COMPLETE, training.said()
    assert (job.pods_made, job.failed) == (2, 0)
    training.run.assert_exact(straight(1))


def lost_run(job):
    """A restart whose run is not there: 66."""
    set_variable(job, "TRAINCKPT_RESTART", "1")


def bad_option(job):
    """78."""
    set_variable(job, "TRAINCKPT_GRACE", "soon")


@pytest.mark.parametrize(("code", "change"), [(66, lost_run), (78, bad_option)])
def test_a_start_that_would_fail_again_fails_the_job_at_once(training, code, change):
    job = submit(training, "job.yaml", change)
    assert until_ended(job, training) == BY_RULE, training.said()
    assert job.pods_made == 1
    assert training.ended("train-1")["exitCode"] == code


def test_a_run_whose_snapshots_are_damaged_fails_the_job_at_once(training):
    job = submit(training, "job.yaml")
    until_trained(job, training, 3)
    first = training.running()
    pause(training.run)
    training.until_stopped(first, 1)
    files = list(Path(training.run.place).glob("snapshots/*/*.safetensors"))
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    assert files
    assert until_ended(job, training) == BY_RULE, training.said()
    assert training.ended("train-2")["exitCode"] == 65
