"""A real API server, scheduler and Job controller stop the Job of `configs/kubernetes`.

Each stop is saved, a new pod goes on, and the run ends as if it had not been stopped. Kubernetes
1.20 drops what it does not know of the manifest, `podFailurePolicy` for one: see
`test_pod_failure_policy.py`.
"""

from __future__ import annotations

import pytest

from tests.daemons import wait_for
from tests.kubernetes.cluster import NODES
from tests.kubernetes.training import (
    LIMIT_S,
    Training,
    container_of,
    manifest,
    pause,
    pod_of,
    run_without_supervisor,
    submitted,
    train,
    urgent_pod,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # each wait has LIMIT_S


@pytest.fixture
def begin(cluster, namespace, tmp_path):
    """Submit the Job for a new run, as `change` wants it, on the first node only."""

    def begin(ranks: int = 1, change=lambda job: None) -> Training:
        cluster.cordon(NODES[1])
        return submitted(cluster, namespace, Run(tmp_path / "r", ranks), change)

    return begin


def test_an_evicted_pod_saves_and_a_new_one_goes_on_to_the_same_bit(begin, straight):
    """By the eviction API, as `kubectl drain` and the autoscaler do it."""
    training = begin(ranks=2)
    training.until_trained(5)
    first = training.running()
    training.cluster.api.evict(first, training.namespace)
    training.until_stopped(first, 1)
    training.until_complete()
    assert training.run.record(1).outcome["reason"] == "SIGTERM"
    assert len(training.cluster.statuses(training.namespace)) == 2
    training.run.assert_exact(straight(2))


def test_a_pod_that_the_scheduler_preempts_saves_and_goes_on_after_the_urgent_one(begin, straight):
    """For a pod of a higher PriorityClass; each wants all GPUs of the only node that is open."""
    training = begin()
    training.until_trained(3)
    first, api = training.running(), training.cluster.api
    name = f"urgent-{training.namespace}"
    api.create("priorityclasses", {"metadata": {"name": name}, "value": 1000})
    api.create("pods", urgent_pod(name), training.namespace)
    training.until_stopped(first, 1)

    def urgent_phase() -> str:
        return api.get("pods", name, training.namespace)["status"]["phase"]

    wait_for(lambda: urgent_phase() == "Succeeded", LIMIT_S, training.said)
    training.until_complete()
    training.run.assert_exact(straight(1))


def test_a_run_whose_node_is_drained_goes_on_on_another_node(begin, straight):
    training = begin()
    training.until_trained(3)
    first = training.running()
    training.cluster.cordon(NODES[1], off=True)
    training.cluster.cordon(NODES[0])
    training.cluster.api.evict(first, training.namespace)
    training.until_stopped(first, 1)
    training.until_complete()
    nodes = {pod["spec"]["nodeName"] for pod in training.pods()}
    assert nodes == {NODES[1]}
    training.run.assert_exact(straight(1))


def test_a_run_in_a_pod_without_a_supervisor_is_process_1_and_saves_when_deleted(begin, straight):
    """`kubectl delete pod`."""
    training = begin(change=run_without_supervisor)
    training.until_trained(3)
    first = training.running()
    training.cluster.api.delete("pods", first, training.namespace)
    training.until_stopped(first, 1)
    training.until_complete()
    assert training.run.record(1).facts["pids"] == [1]
    training.run.assert_exact(straight(1))


def test_a_hook_before_the_stop_uses_a_part_of_the_grace_and_the_rest_is_enough(begin, straight):
    def with_hook(job):
        command = ["sh", "-c", "touch /runs/hook; sleep 3"]
        container_of(job)["lifecycle"] = {"preStop": {"exec": {"command": command}}}

    training = begin(change=with_hook)
    training.until_trained(3)
    first = training.running()
    training.cluster.api.evict(first, training.namespace)
    training.until_stopped(first, 1)
    assert (training.run.folder / "hook").exists()
    training.until_complete()
    training.run.assert_exact(straight(1))


def test_a_finished_run_that_another_job_starts_again_trains_nothing(begin, straight):
    training = begin()
    (training.run.folder / SLOW).unlink()
    training.until_complete()
    training.run.assert_exact(straight(1))
    again = manifest("job.yaml")
    train(again, training.run)
    again["metadata"]["name"] = "again"
    training.cluster.api.create("jobs", again, training.namespace)
    training.until_complete("again")
    training.run.assert_exact(straight(1))


def test_a_container_that_is_restarted_in_its_pod_goes_on(begin, straight):
    """`restartPolicy: OnFailure`, for Jobs without a podFailurePolicy; stopped by `trainckpt
    pause`."""

    def on_failure(job):
        pod_of(job)["restartPolicy"] = "OnFailure"

    training = begin(change=on_failure)
    training.until_trained(3)
    first = training.running()
    pause(training.run)
    (training.run.folder / SLOW).unlink()
    training.until_complete()
    (status,) = training.cluster.statuses(training.namespace)[first]["containerStatuses"]
    assert status["restartCount"] == 1
    assert training.run.record(1).outcome["outcome"] == "stopped"
    training.run.assert_exact(straight(1))
