"""A new pod that trains the run while the old one still does.

The real Job controller makes it as soon as the old one is being deleted, as a newer one does
without a podFailurePolicy. What the older attempt commits from then on counts for nothing.
"""

from __future__ import annotations

import pytest

from tests.daemons import wait_for
from tests.end_to_end.training import catalog
from tests.kubernetes.cluster import NODES
from tests.kubernetes.training import (
    LIMIT_S,
    assert_repeated_exactly,
    container_of,
    last_committed_step,
    resumed_from,
    save_each_step,
    set_variable,
    submitted,
)
from tests.start_commands.pace import SLOW
from tests.start_commands.started import Run
from trainckpt.snapshot.catalog import ABANDONED

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def hold_until_overlapped(job):
    """The pod is being deleted, and trains on, until the test lets it go."""
    command = ["sh", "-c", "until test -e /runs/overlapped; do sleep 0.2; done"]
    container_of(job)["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    save_each_step(job)


@pytest.fixture
def begin(cluster, namespace, tmp_path):
    def begin(change):
        cluster.cordon(NODES[1])
        training = submitted(cluster, namespace, Run(tmp_path / "r", 1), change)
        training.until_committed()
        cluster.cordon(NODES[1], off=True)
        return training

    return begin


def until_both_have_trained(training):
    """The newer attempt has begun, and each has committed a step since."""
    run = training.run
    wait_for(lambda: resumed_from(run, 2), LIMIT_S, training.said)
    began = resumed_from(run, 2)["step"]
    wait_for(lambda: last_committed_step(run, 1) > began, LIMIT_S, training.said)
    wait_for(lambda: last_committed_step(run, 2) > began, LIMIT_S, training.said)
    return began


def assert_older_attempt_is_fenced(run, began):
    """None of its later snapshots is a candidate, and the newer attempt has finished the run."""
    late = [c for c in catalog(run.place) if c.name.attempt == 1 and c.name.step > began]
    assert {candidate.reason for candidate in late} == {ABANDONED}
    assert run.record(2).outcome["outcome"] == "finished"


def test_a_pod_that_trains_on_while_it_is_deleted_spoils_nothing(begin, straight):
    training = begin(hold_until_overlapped)
    first = training.running()
    training.cluster.api.evict(first, training.namespace)
    began = until_both_have_trained(training)
    (training.run.folder / "overlapped").touch()
    assert training.until_ended(first)["exitCode"] == 75
    (training.run.folder / SLOW).unlink()
    training.until_complete()
    assert_older_attempt_is_fenced(training.run, began)
    assert_repeated_exactly(training.run, straight(1))


def test_a_pod_on_a_lost_node_that_is_deleted_by_force_spoils_nothing(begin, straight):
    """Its node cannot be asked to end it: it trains on until the node is back."""

    def slow(job):
        """A loss is found out after 40 s: the run must last longer."""
        set_variable(job, "PAUSE_S", "4")
        save_each_step(job)

    training = begin(slow)
    first = training.running()
    with training.cluster.lost(NODES[0]):
        training.cluster.api.delete("pods", first, training.namespace, gracePeriodSeconds=0)
        began = until_both_have_trained(training)
        assert training.ended(first) == {}  # nobody has heard of its end
    (training.run.folder / SLOW).unlink()
    training.until_complete()
    assert_older_attempt_is_fenced(training.run, began)
    assert_repeated_exactly(training.run, straight(1))
