"""`suspend: true` stops a run cleanly, and `suspend: false` continues it: JobSet, TrainJob, Kueue.

The API server, the scheduler and the pods' ends are those of `test_job.py`; JobSets and TrainJobs
are objects of that server, and their controllers are ours (`job_set_controllers.py`).
"""

from __future__ import annotations

import pytest

from tests.daemons import wait_for
from tests.kubernetes.api_client import ApiError
from tests.kubernetes.job_controller import COMPLETE, Job
from tests.kubernetes.job_set_controllers import Queue
from tests.kubernetes.training import (
    LIMIT_S,
    Training,
    manifest,
    train,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def until(controller, training, condition):
    """The controller works until then."""

    def holds():
        controller.step()
        return condition()

    wait_for(holds, LIMIT_S, training.said)


def until_trained(controller, training, more):
    wanted = training.run.trained() + more
    until(controller, training, lambda: training.run.trained() >= wanted)


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
