"""A grace period that is over before the stop is: the pod is killed at its deadline.

What was committed before stands, and the next pod goes on from there. So it is on every path: a
preStop hook that takes the time, a disk that takes it, a micro-batch that takes it.
"""

from __future__ import annotations

import pytest

from tests.kubernetes.cluster import NODES
from tests.kubernetes.job import SLOW_DISK
from tests.kubernetes.training import (
    assert_repeated_exactly,
    container_of,
    last_committed_step,
    pod_of,
    resumed_from,
    save_each_step,
    set_variable,
    submitted,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HOOK_S, GRACE_S = 3, 6


@pytest.fixture
def begin(cluster, namespace, tmp_path):
    def begin(change):
        cluster.cordon(NODES[1])
        training = submitted(cluster, namespace, Run(tmp_path / "r", 1), change)
        training.until_committed()
        return training

    return begin


def until_killed(training):
    """Evict it; the last step that was committed when it had been killed."""
    first = training.running()
    training.cluster.api.evict(first, training.namespace)
    assert training.until_ended(first)["exitCode"] == 137, training.said()
    return last_committed_step(training.run, 1)


def assert_goes_on_from(training, step, straight):
    (training.run.folder / SLOW).unlink()
    training.until_complete()
    assert resumed_from(training.run, 2) == {"epoch": 0, "step": step, "micro": 0}
    assert_repeated_exactly(training.run, straight(1))


def short(job, seconds):
    pod_of(job)["terminationGracePeriodSeconds"] = seconds
    save_each_step(job)


def test_a_save_that_outlasts_what_a_hook_has_left_is_killed_and_the_last_commit_stands(
    begin, straight
):
    """The manifest promises the run 150 s, and gives it 3 s: the save is begun."""

    def too_short(job):
        short(job, GRACE_S)
        command = ["sleep", str(HOOK_S)]
        container_of(job)["lifecycle"] = {"preStop": {"exec": {"command": command}}}

    training = begin(too_short)
    (training.run.folder / SLOW_DISK).touch()
    step = until_killed(training)
    (training.run.folder / SLOW_DISK).unlink()
    assert_goes_on_from(training, step, straight)


def test_a_micro_batch_that_outlasts_the_grace_is_killed_and_the_last_commit_stands(
    begin, straight
):
    """Two seconds, in a micro-batch of a minute; the manifest promises the run far more."""

    def too_short(job):
        short(job, 2)
        set_variable(job, "PAUSE_S", "60")
        set_variable(job, "PACED_FROM", "5")

    training = begin(too_short)
    assert_goes_on_from(training, until_killed(training), straight)
