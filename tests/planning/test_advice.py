"""Advice from the figures of a cluster, and from what a run has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainckpt.attempt.options import read_options
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import FAILED, KILLED, STOPPED, AttemptRecord
from trainckpt.format.attempt_times import TIMES, AttemptTimes, TrainedCount
from trainckpt.planning.advice import every_text, for_cluster, for_run
from trainckpt.planning.closed_forms import young_s
from trainckpt.planning.cluster import Cluster
from trainckpt.planning.faults import CLUSTER, HOST, RANK, SWITCH, FaultModel
from trainckpt.planning.run_history import measure

CLUSTER_OF_1024 = Cluster(gpus=1024, state_bytes=980e9, step_s=4.0, store_bytes_per_s=5e9)
FAULTS = FaultModel(means_s={RANK: 2e5, HOST: 36_000.0, SWITCH: 4e5, CLUSTER: 3e6})


def options(recommended):
    return {each.option: each.value for each in recommended.options}


def attempt(number, outcome, *, steps, saves=10, save_s=2.0, seconds=110.0, began=0.0):
    """A record of an attempt that trained 100 s of its 110, of which saves took 2."""
    times = AttemptTimes(
        began=began,
        seconds=seconds,
        trains_at=6.0,
        leaves_at=seconds - 4.0,
        restore_s=2.0 if steps[0] else 0.0,
        save_s=save_s,
        saves=saves,
        begun=TrainedCount(*steps[:1] * 2),
        reached=TrainedCount(*steps[1:] * 2),
    )
    return AttemptRecord(
        number,
        parent=None,
        outcome=outcome and {"outcome": outcome, "seconds": seconds},
        facts={"world": 8, "started": began, TIMES: times.to_json()},
    )


def test_each_option_is_one_that_a_run_can_read():
    advised = options(for_cluster(CLUSTER_OF_1024, FAULTS))
    assert advised.pop("failure_domain") == "the name of the switch"
    assert advised.keys() == {"memory_every", "every", "redundancy", "stop_at", "grace"}
    read = read_options(advised)
    assert read.memory_every.steps == int(advised["memory_every"].split()[0])
    assert read.every.seconds is not None


def test_what_is_advised_loses_less_than_its_neighbours():
    found = for_cluster(CLUSTER_OF_1024, FAULTS)
    lost = 100 * found.lost_share
    for name, interval_s in found.plan.intervals.items():
        curve = found.curve(name)
        assert curve[0][0] < interval_s < curve[-1][0]
        near = [percent for at_s, percent in curve if interval_s / 4 < at_s < interval_s * 4]
        assert lost <= min(near) * 1.01


def test_parity_is_advised_where_copies_would_not_fit():
    assert options(for_cluster(CLUSTER_OF_1024, FAULTS))["redundancy"] == "partner"
    little = for_cluster(CLUSTER_OF_1024, FAULTS, host_memory_bytes=64e9)
    assert options(little)["redundancy"] == "rs:8+2"
    one_host = for_cluster(replace(CLUSTER_OF_1024, gpus=8, state_bytes=10e9), FAULTS)
    assert options(one_host)["redundancy"] == "none"
    assert [level.name for level in one_host.levels] == ["memory", "store"]


def test_the_grace_leaves_time_for_the_final_save():
    slow = replace(CLUSTER_OF_1024, store_bytes_per_s=2e9)  # 490 s
    grace = read_options({"grace": options(for_cluster(slow, FAULTS))["grace"]}).grace
    assert grace == pytest.approx(2 * 490, rel=0.1)


def test_a_run_that_failed_often_is_advised_by_what_it_measured():
    records = {
        1: attempt(1, FAILED, steps=(0, 100)),
        2: attempt(2, KILLED, steps=(90, 190), began=120.0),
        3: attempt(3, FAILED, steps=(180, 280), began=240.0),
        4: attempt(4, None, steps=(270, 370), began=360.0),
    }
    run = measure(records, None)
    assert (run.failures, run.saves, run.world) == (3, 40, 8)
    assert run.mtbf_s == pytest.approx(440 / 3)
    assert run.stall_s == pytest.approx(0.2)
    assert run.step_s == pytest.approx(0.98)
    assert run.restore_s == pytest.approx(2.0)
    assert run.downtime_s == pytest.approx(10.0 + 4.0)  # the gap, and the start-up
    assert run.every_s == pytest.approx(10.0)

    found = for_run(run)
    best_s = young_s(0.2, 440 / 3)
    assert found.plan.intervals == {"local": pytest.approx(best_s)}
    assert options(found)["every"] == f"{round(best_s / 0.98)} steps"
    assert found.now > found.lost_share


def test_a_run_that_hardly_failed_is_not_advised_by_chance():
    calm = measure({1: attempt(1, STOPPED, steps=(0, 100))}, None)
    assert calm.failures == 0
    assert calm.mtbf_s == pytest.approx(24 * 3600 + 110)
    once = measure({1: attempt(1, FAILED, steps=(0, 100))}, None)
    assert once.mtbf_s == pytest.approx((24 * 3600 + 110) / 2)
    told = measure({1: attempt(1, FAILED, steps=(0, 100))}, None, mtbf_s=3600.0)
    assert told.mtbf_s == 3600.0


def test_a_run_without_a_measured_save_is_refused():
    for records in ({1: AttemptRecord(1)}, {1: attempt(1, STOPPED, steps=(0, 5), saves=0)}):
        with pytest.raises(ConfigurationError, match="has measured a save yet"):
            measure(records, None)


def test_an_interval_is_a_text_that_the_option_every_takes():
    texts = {0.3: "1 step", 4.0: "8 steps", 45.0: "45 s", 240.0: "4 min", 9000.0: "2 h"}
    assert {seconds: every_text(seconds, 0.5) for seconds in texts} == texts
