"""The interval of each level, and what a run loses: against what is known, and against search."""

from __future__ import annotations

import itertools
import math

import pytest

from trainckpt.planning.closed_forms import Level, daly_s, expected_loss, plan, young_s


def level(name, stall_s, mtbf_s, **more):
    return Level(name=name, stall_s=stall_s, failures_per_s=1 / mtbf_s, **more)


def test_one_level_has_youngs_interval_and_dalys_is_nearly_that_where_saves_are_cheap():
    assert plan([level("disk", 0.5, 3600.0)]).intervals == {"disk": pytest.approx(60.0)}
    assert daly_s(0.5, 3600.0) == pytest.approx(young_s(0.5, 3600.0), rel=0.01)
    assert daly_s(5000.0, 2000.0) == 7000.0  # a save takes longer than a run lives


def test_the_loss_of_dalys_interval_is_within_a_thousandth_of_the_least_and_youngs_within_a_tenth():
    for stall_s, mtbf_s in itertools.product((0.05, 6.3, 148.8), (900.0, 11_137.0)):
        one = [level("store", stall_s, mtbf_s, restore_s=130.0)]

        def loss(interval_s, one=one):
            return expected_loss(one, [interval_s], downtime_s=120.0).total

        least = min(loss(stall_s * 1.01 + mtbf_s * k / 20_000) for k in range(1, 40_000))
        assert loss(daly_s(stall_s, mtbf_s)) <= least * 1.001
        assert loss(young_s(stall_s, mtbf_s)) <= least * 1.1


def test_the_loss_of_one_level_is_the_expectation_of_a_poisson_process():
    stall_s, mtbf_s, interval_s, again_s = 30.0, 4000.0, 600.0, 400.0
    one = [level("store", stall_s, mtbf_s, restore_s=100.0, latency_s=0.0)]
    rate = 1 / mtbf_s
    wall_s = math.exp(rate * again_s) * mtbf_s * math.expm1(rate * interval_s)  # of one interval
    lost = expected_loss(one, [interval_s], downtime_s=300.0)
    assert 1 + lost.total == pytest.approx(wall_s / (interval_s - stall_s))
    assert lost.ettr == pytest.approx((interval_s - stall_s) / wall_s)
    assert lost.stall == pytest.approx(30 / 570)
    assert lost.by_checkpoints == pytest.approx(lost.total - lost.downtime)


def test_each_level_has_its_own_interval_and_no_choice_of_levels_or_intervals_loses_less():
    levels = [
        level("memory", 0.05, 70_000.0, restore_s=2.0),
        level("store", 2.0, 1_000_000.0, restore_s=130.0, latency_s=60.0),
    ]
    chosen = plan(levels, downtime_s=120.0)
    assert chosen.intervals == {
        "memory": pytest.approx(young_s(0.05, 70_000.0)),
        "store": pytest.approx(young_s(1.95, 1_000_000.0)),
    }
    grid = [10.0 * 1.05**k for k in range(160)]
    tried = [
        expected_loss(levels, [near_s, far_s], downtime_s=120.0).total
        for near_s, far_s in itertools.product(grid, grid)
        if near_s <= far_s
    ]
    assert chosen.loss.total <= min(tried) * 1.001


def test_a_level_that_costs_nothing_more_shares_the_interval_of_the_nearer_one():
    shared = plan([level("memory", 0.05, 70_000.0), level("partner", 0.05, 13_000.0)])
    both_s = young_s(0.05, 1 / (1 / 70_000 + 1 / 13_000))
    assert shared.intervals == {"memory": pytest.approx(both_s), "partner": pytest.approx(both_s)}


def test_a_level_whose_saves_cost_more_than_its_failures_is_not_used():
    levels = [level("memory", 5.0, 1e9), level("store", 1.0, 10_000.0)]
    assert plan(levels).intervals.keys() == {"store"}
    pinned = [level("memory", 5.0, 1e9, at_s=100.0), level("store", 1.0, 10_000.0)]
    assert plan(pinned).intervals["memory"] == 100.0


def test_no_interval_is_shorter_than_a_step_a_save_or_that_of_a_nearer_level():
    levels = [level("memory", 0.0, 10_000.0), level("store", 1.0, 20_000.0, least_s=900.0)]
    assert plan(levels, step_s=7.0).intervals == {"memory": 7.0, "store": 900.0}
    assert plan(levels, step_s=1000.0).intervals == {"memory": 1000.0, "store": 1000.0}
    assert plan([level("disk", 10.0, 1e9)], most_s=3600.0).intervals == {"disk": 3600.0}


def test_a_run_that_never_gets_through_an_interval_loses_everything():
    assert expected_loss([level("disk", 10.0, 1.0)], [10.0]).total == math.inf
    assert expected_loss([level("disk", 1.0, 1.0)], [1000.0]).ettr == 0.0
