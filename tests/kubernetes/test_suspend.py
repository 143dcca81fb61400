"""`suspend: true` stops a run cleanly, and `suspend: false` continues it: JobSet, TrainJob, Kueue.

The API server, the scheduler and the pods' ends are those of `test_job.py`; JobSets and TrainJobs
are objects of that server, and their controllers are ours (`job_set_controllers.py`).
"""

from __future__ import annotations

import copy

import pytest

from tests.daemons import free_ports, wait_for
from tests.kubernetes.api_client import ApiError
from tests.kubernetes.job_controller import COMPLETE, Job, disrupt
from tests.kubernetes.job_set_controllers import JobSet, Queue, TrainJob
from tests.kubernetes.training import (
    LIMIT_S,
    Training,
    assert_repeated_exactly,
    container_of,
    manifest,
    save_each_step,
    set_variable,
    train,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PODS = ("train-node-0-1", "train-node-0-2")


@pytest.fixture
def training(cluster, namespace, tmp_path):
    return Training(cluster, namespace, Run(tmp_path / "r", 2))


def job_set_for(run, change=lambda job: None):
    """The JobSet of `configs/kubernetes`, to train `run` in its two pods."""
    whole = manifest("jobset.yaml")
    (job,) = whole["spec"]["replicatedJobs"]
    train(job["template"], run, pods=2)
    words = container_of(job["template"])["command"]
    port = words.index("--rdzv-endpoint") + 1  # all pods here have one network
    words[port] = words[port].replace("29500", str(free_ports(1)[0]))
    change(job["template"])
    return whole


def as_job_set(training):
    return JobSet(training.cluster.api, training.namespace, job_set_for(training.run))


def as_train_job(training):
    """A TrainJob whose runtime has the template of the JobSet, and that names the command."""
    api, version = training.cluster.api, "trainer.kubeflow.org/v1alpha1"
    spec = job_set_for(training.run)["spec"]
    template = copy.deepcopy(spec)
    container_of(template["replicatedJobs"][0]["template"])["command"] = ["false"]
    runtime = {"kind": "TrainingRuntime", "metadata": {"name": "trainckpt"}}
    body = {"apiVersion": version, **runtime, "spec": {"template": {"spec": template}}}
    api.create("trainingruntimes", body, training.namespace)
    command = container_of(spec["replicatedJobs"][0]["template"])["command"]
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": "train"},
        "spec": {
            "runtimeRef": {"name": "trainckpt", "kind": "TrainingRuntime"},
            "trainer": {"command": command, "numNodes": 2},
        },
    }
    return TrainJob(api, training.namespace, job)


def until(controller, training, condition):
    """The controller works until then."""

    def holds():
        controller.step()
        return condition()

    wait_for(holds, LIMIT_S, training.said)


def until_trained(controller, training, more):
    wanted = training.run.trained() + more
    until(controller, training, lambda: training.run.trained() >= wanted)


@pytest.mark.parametrize(
    ("submit", "end", "reasons"),
    [
        (as_job_set, "Completed", ("SuspendedJobs", "ResumeJobs")),
        (as_train_job, "Complete", ("Suspended", "Resumed")),
    ],
)
def test_all_pods_of_a_suspended_set_save_and_it_continues_where_they_stopped(
    training, straight, submit, end, reasons
):
    jobs = submit(training)
    until_trained(jobs, training, 4)
    assert {pod["spec"]["nodeName"] for pod in training.pods()} == {"n1", "n2"}
    jobs.suspend()
    until(jobs, training, lambda: jobs.conditions() and not jobs.pods())
    assert jobs.conditions()["Suspended"] == ("True", reasons[0])
    assert {training.ended(pod)["exitCode"] for pod in PODS} == {75}, training.said()
    training.run.assert_stopped(1)
    (training.run.folder / SLOW).unlink()
    jobs.suspend(False)
    until(jobs, training, lambda: jobs.ended)
    assert jobs.ended == end, training.said()
    assert jobs.conditions()["Suspended"] == ("False", reasons[1])
    training.run.assert_exact(straight(2))


def test_a_set_that_is_suspended_is_restarted_once_and_that_does_not_count(training, straight):
    """By the rule that fails its Job on 75: its new Jobs are made suspended, without pods."""
    jobs = as_job_set(training)
    until_trained(jobs, training, 3)
    jobs.suspend()
    until(jobs, training, lambda: jobs.restarts() == (1, 0))
    for _ in range(5):
        jobs.step()
        assert jobs.pods() == []
    (training.run.folder / SLOW).unlink()
    jobs.suspend(False)
    until(jobs, training, lambda: jobs.ended)
    assert jobs.ended == "Completed", training.said()
    assert jobs.restarts() == (1, 0)
    training.run.assert_exact(straight(2))


def test_a_set_whose_one_pod_is_drained_saves_in_all_and_starts_again_as_a_whole(
    training, straight
):
    jobs = as_job_set(training)
    until_trained(jobs, training, 3)
    disrupt(training.cluster.api, PODS[1], training.namespace)
    until(jobs, training, lambda: all(training.ended(pod) for pod in PODS))
    (training.run.folder / SLOW).unlink()
    assert {training.ended(pod)["exitCode"] for pod in PODS} == {75}, training.said()
    training.run.assert_stopped(1)
    until(jobs, training, lambda: jobs.ended)
    assert jobs.ended == "Completed", training.said()
    assert jobs.restarts() == (1, 0)
    training.run.assert_exact(straight(2))


def test_a_set_whose_pod_crashes_starts_again_and_that_counts(training, straight):
    def crash(job):
        save_each_step(job)
        set_variable(job, "FAIL_AT", "8")
        set_variable(job, "FAIL_BY", "exception")

    body = job_set_for(training.run, crash)
    jobs = JobSet(training.cluster.api, training.namespace, body)
    until(jobs, training, lambda: jobs.restarts() == (1, 1))
    (training.run.folder / SLOW).unlink()
    until(jobs, training, lambda: jobs.ended)
    assert jobs.ended == "Completed", training.said()
    assert jobs.restarts() == (1, 1)
    assert_repeated_exactly(training.run, straight(2))


def test_kueue_preempts_a_job_for_an_urgent_one_and_admits_it_again(
    cluster, namespace, straight, tmp_path
):
    """The low one of two Jobs, on 8 GPUs, by the manifest for Kueue."""
    low, urgent = (
        Training(cluster, namespace, Run(tmp_path / name, 1), name) for name in ("low", "urgent")
    )
    queue, jobs = Queue(gpus=8), {}
    for training in (low, urgent):
        body = manifest("kueue.yaml")
        train(body, training.run, claim=training.claim)
        jobs[training] = Job(cluster.api, namespace, body, training.claim)
    queue.submit(jobs[low], priority=0, gpus=8)
    until_trained(queue, low, 4)
    queue.submit(jobs[urgent], priority=100, gpus=8)
    (urgent.run.folder / SLOW).unlink()
    until(queue, low, lambda: low.ended("low-1"))
    low.until_stopped("low-1", 1)
    until(queue, low, lambda: jobs[low].ended)
    assert (jobs[urgent].ended, jobs[low].ended) == (COMPLETE, COMPLETE), low.said()
    assert (jobs[low].pods_made, jobs[low].failed, jobs[urgent].pods_made) == (2, 0, 1)
    low.run.assert_exact(straight(1))
    urgent.run.assert_exact(straight(1))


def test_kueue_preempts_a_set_for_an_urgent_job_and_admits_it_again(
    cluster, namespace, straight, tmp_path
):
    low = Training(cluster, namespace, Run(tmp_path / "low", 2))
    urgent = Training(cluster, namespace, Run(tmp_path / "urgent", 1), "urgent")
    jobs = as_job_set(low)
    body = manifest("kueue.yaml")
    train(body, urgent.run, claim=urgent.claim)
    job = Job(cluster.api, namespace, body, "urgent")
    queue = Queue(gpus=16)
    queue.submit(jobs, priority=0, gpus=16)
    until_trained(queue, low, 4)
    queue.submit(job, priority=100, gpus=8)
    (urgent.run.folder / SLOW).unlink()
    until(queue, low, lambda: all(low.ended(pod) for pod in PODS))
    low.run.assert_stopped(1)
    (low.run.folder / SLOW).unlink()
    until(queue, low, lambda: jobs.ended)
    assert (job.ended, jobs.ended) == (COMPLETE, "Completed"), low.said()
    low.run.assert_exact(straight(2))
    urgent.run.assert_exact(straight(1))


def test_the_server_takes_the_set_of_the_configs_whole_and_refuses_an_unknown_action(
    cluster, namespace
):
    """By the types of `custom_resources.py`; a real server drops and refuses by its CRD."""
    body = manifest("jobset.yaml")
    stored = cluster.api.create("jobsets", body, namespace)
    assert stored["spec"] == body["spec"]
    body["spec"]["failurePolicy"]["rules"][0]["action"] = "StartAgain"
    body["metadata"]["name"] = "other"
    with pytest.raises(ApiError, match="Unsupported value"):
        cluster.api.create("jobsets", body, namespace)
