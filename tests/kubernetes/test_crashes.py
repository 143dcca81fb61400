"""Containers that fail: by an exception (1), or killed for the memory they take (137).

The real Job controller counts each against `backoffLimit`, and a new start goes on from the newest
snapshot, in the same pod or in a new one, as `restartPolicy` says.
"""

from __future__ import annotations

import pytest

from tests.faults import cgroup
from tests.kubernetes.cluster import NODES
from tests.kubernetes.training import (
    assert_repeated_exactly,
    container_of,
    pod_of,
    resumed_from,
    run_without_supervisor,
    save_each_step,
    set_variable,
    submitted,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CODES = {"exception": 1, "memory": 137}
OUTCOMES = {"exception": "failed", "memory": "killed"}
REASONS = {"exception": "Error", "memory": "OOMKilled"}


def fail_once(job, how, restart_policy="Never"):
    """In the second micro-batch of the third step."""
    pod_of(job)["restartPolicy"] = restart_policy
    container_of(job)["resources"]["limits"]["memory"] = "3Gi"
    save_each_step(job)
    set_variable(job, "FAIL_AT", "8")
    set_variable(job, "FAIL_BY", how)


@pytest.fixture
def begin(cluster, namespace, tmp_path):
    def begin(change):
        cluster.cordon(NODES[1])
        training = submitted(cluster, namespace, Run(tmp_path / "r", 1), change)
        # Four steps of three micro-batches, of which the failing one is the eighth.
        training.until_trained(10)
        (training.run.folder / SLOW).unlink()
        return training

    return begin


def needs_memory_limits(how):
    if how == "memory" and (reason := cgroup.why_not()):
        pytest.skip(reason)


@pytest.mark.parametrize("how", ["exception", "memory"])
def test_a_crashed_pod_is_counted_and_a_new_one_goes_on_from_the_newest_snapshot(
    begin, straight, how
):
    needs_memory_limits(how)
    training = begin(lambda job: fail_once(job, how))
    training.until_complete()
    statuses = training.cluster.statuses(training.namespace)
    ends = [each["containerStatuses"][0]["state"]["terminated"] for each in statuses.values()]
    found = {end["exitCode"]: end["reason"] for end in ends}
    assert found == {CODES[how]: REASONS[how], 0: "Completed"}
    assert training.status()["failed"] == 1
    assert training.run.record(1).outcome["outcome"] == OUTCOMES[how]
    assert resumed_from(training.run, 2) == {"epoch": 0, "step": 2, "micro": 0}
    assert_repeated_exactly(training.run, straight(1))


@pytest.mark.parametrize("how", ["exception", "memory"])
def test_a_crashed_container_is_restarted_in_its_pod_by_on_failure(begin, straight, how):
    needs_memory_limits(how)
    training = begin(lambda job: fail_once(job, how, "OnFailure"))
    training.until_complete()
    (pod,) = training.cluster.statuses(training.namespace).values()
    assert pod["containerStatuses"][0]["restartCount"] == 1
    assert resumed_from(training.run, 2) == {"epoch": 0, "step": 2, "micro": 0}
    assert_repeated_exactly(training.run, straight(1))


def test_a_script_that_is_process_1_and_is_killed_for_its_memory_ends_with_137(begin, straight):
    needs_memory_limits("memory")

    def alone(job):
        run_without_supervisor(job)
        fail_once(job, "memory")
        container_of(job)["command"] += ["--save-every", "1"]

    training = begin(alone)
    training.until_complete()
    statuses = training.cluster.statuses(training.namespace).values()
    ends = [each["containerStatuses"][0]["state"]["terminated"] for each in statuses]
    assert sorted(end["exitCode"] for end in ends) == [0, 137]
    assert_repeated_exactly(training.run, straight(1))


def test_a_job_whose_every_start_crashes_fails_at_its_limit(cluster, namespace, tmp_path):
    def always(job):
        fail_once(job, "exception")
        set_variable(job, "FAIL_AT", "1")
        set_variable(job, "FAIL_ALWAYS", "yes")
        job["spec"]["backoffLimit"] = 1

    training = submitted(cluster, namespace, Run(tmp_path / "r", 1), always)
    assert training.until_over() == [("Failed", "BackoffLimitExceeded")], training.said()
    statuses = cluster.statuses(namespace).values()
    ends = [each["containerStatuses"][0]["state"]["terminated"] for each in statuses]
    assert [end["exitCode"] for end in ends] == [1, 1]
