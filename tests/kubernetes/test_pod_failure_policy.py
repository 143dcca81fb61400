"""Each row of a Job's podFailurePolicy, which Kubernetes 1.20 does not know, and its `suspend`.

The API server, the scheduler and the pods' ends are those of `test_job.py`; the Job
controller is ours (`job_controller.py`), and acts on the manifests of `configs/kubernetes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemons import wait_for
from tests.kubernetes.cluster import NODES
from tests.kubernetes.job_controller import BY_RULE, COMPLETE, TOO_MANY, Job, disrupt
from tests.kubernetes.training import (
    LIMIT_S,
    Training,
    assert_repeated_exactly,
    container_of,
    last_committed_step,
    manifest,
    pause,
    pod_of,
    resumed_from,
    save_each_step,
    set_variable,
    train,
    urgent_pod,
)
from tests.start_commands.pace import SLOW
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


def test_a_pod_that_the_scheduler_preempts_is_ignored_by_its_exit_code_alone(training, straight):
    """The real scheduler, for a pod of a higher PriorityClass. 1.20 has no DisruptionTarget: the
    rule for 75 decides."""
    training.cluster.cordon(NODES[1])
    job = submit(training, "job.yaml")
    until_trained(job, training, 3)
    first, api = training.running(), training.cluster.api
    name = f"urgent-{training.namespace}"
    api.create("priorityclasses", {"metadata": {"name": name}, "value": 1000})
    api.create("pods", urgent_pod(name), training.namespace)
    until(job, training, lambda: training.ended(first))
    training.until_stopped(first, 1)
    assert until_ended(job, training) == COMPLETE, training.said()
    assert api.get("pods", name, training.namespace)["status"]["phase"] == "Succeeded"
    assert (job.pods_made, job.failed) == (2, 0)
    training.run.assert_exact(straight(1))


def killed_at_once(job):
    """Two seconds of grace, in a micro-batch of a minute."""
    pod_of(job)["terminationGracePeriodSeconds"] = 2
    set_variable(job, "PAUSE_S", "60")
    set_variable(job, "PACED_FROM", "5")
    save_each_step(job)


def test_a_pod_that_is_killed_in_a_disruption_is_not_counted(training, straight):
    """137, for want of grace, but with its condition."""
    job = submit(training, "job.yaml", killed_at_once)
    until(job, training, lambda: last_committed_step(training.run, 1))
    first = training.running()
    disrupt(training.cluster.api, first, training.namespace)
    assert training.until_ended(first)["exitCode"] == 137
    (training.run.folder / SLOW).unlink()
    assert until_ended(job, training) == COMPLETE, training.said()
    assert (job.pods_made, job.failed) == (2, 0)
    assert_repeated_exactly(training.run, straight(1))


def test_a_suspended_pod_that_is_killed_for_want_of_grace_counts(training, straight):
    """A suspension is no disruption: no rule is about 137."""
    job = submit(training, "job.yaml", killed_at_once)
    until(job, training, lambda: last_committed_step(training.run, 1))
    first = training.running()
    job.suspend()
    until(job, training, lambda: training.pods() == [])
    assert training.ended(first)["exitCode"] == 137
    (training.run.folder / SLOW).unlink()
    job.suspend(False)
    assert until_ended(job, training) == COMPLETE, training.said()
    assert (job.pods_made, job.failed) == (2, 1)
    assert_repeated_exactly(training.run, straight(1))


def test_a_new_pod_waits_for_the_old_one_to_end(training, straight):
    """podReplacementPolicy Failed, which a podFailurePolicy implies: no two train at once."""

    def held(job):
        command = ["sh", "-c", "until test -e /runs/let-go; do sleep 0.2; done"]
        container_of(job)["lifecycle"] = {"preStop": {"exec": {"command": command}}}

    job = submit(training, "job.yaml", held)
    until_trained(job, training, 3)
    first = training.running()
    training.cluster.api.evict(first, training.namespace)
    until_trained(job, training, 3)  # it trains on while it is being deleted
    assert job.pods_made == 1
    (training.run.folder / "let-go").touch()
    until(job, training, lambda: training.ended(first))
    training.until_stopped(first, 1)
    assert until_ended(job, training) == COMPLETE, training.said()
    assert (job.pods_made, job.failed) == (2, 0)
    training.run.assert_exact(straight(1))


@pytest.mark.parametrize(("limit", "end", "pods"), [(1, COMPLETE, 2), (0, TOO_MANY, 1)])
def test_a_crash_is_counted_against_the_limit(training, straight, limit, end, pods):
    def crash(job):
        job["spec"]["backoffLimit"] = limit
        save_each_step(job)
        set_variable(job, "FAIL_AT", "8")
        set_variable(job, "FAIL_BY", "exception")

    job = submit(training, "job.yaml", crash)
    until_trained(job, training, 8)
    (training.run.folder / SLOW).unlink()
    assert until_ended(job, training) == end, training.said()
    assert (job.pods_made, job.failed) == (pods, 1)
    assert training.ended("train-1")["exitCode"] == 1
    if end == COMPLETE:
        assert resumed_from(training.run, 2) == {"epoch": 0, "step": 2, "micro": 0}
        assert_repeated_exactly(training.run, straight(1))


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
