"""The simulator: against the closed forms, against published runs, and event by event."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest

from trainckpt.planning.cluster import Cluster
from trainckpt.planning.faults import (
    CLUSTER,
    HOST,
    RANK,
    STORE,
    SWITCH,
    Fault,
    FaultModel,
    of_trace,
)
from trainckpt.planning.presets import DAY_S, PRESETS
from trainckpt.planning.save_systems import (
    MEMORY,
    NAMES,
    PARTNER,
    SHARED,
    SavedLevel,
    SaveSystem,
    build_system,
)
from trainckpt.planning.simulation import START, mean_outcome, simulate

SMALL = Cluster(
    gpus=64,
    state_bytes=40e9,
    step_s=1.0,
    hosts_per_switch=4,
    network_bytes_per_s=1e9,
    store_bytes_per_s=1e9,
    restart_s=30.0,
    replace_s=100.0,
)


def faults(**means_s):
    return FaultModel(means_s=means_s)


def struck(*at_and_kind):
    """Faults at known times."""
    return of_trace([Fault(at_s, kind) for at_s, kind in at_and_kind])


def with_levels(cluster, *levels):
    """A system with these levels; its expectation is that of some built one."""
    expected = build_system("synchronous", cluster, faults(rank=1e6)).expected
    return SaveSystem("own", levels, expected)


# ---- against the closed forms


@pytest.mark.parametrize("system", ["synchronous", "async", "trainckpt", "gradients"])
def test_the_time_lost_is_within_two_percent_of_the_closed_forms(system):
    """Poisson faults, none of the store, spares at hand, copies that few faults interrupt."""
    cluster = replace(SMALL, overhead_s=2.0, restart_s=60.0, replace_s=60.0, store_bytes_per_s=8e9)
    model = faults(rank=3000.0, host=3000.0, cluster=6000.0)
    best = build_system(system, cluster, model, {SHARED: 1000.0} if system == "gradients" else None)
    every_s = {
        level.place: level.every_steps * cluster.step_s + level.stall_s for level in best.levels
    }
    in_steps = build_system(system, cluster, model, every_s)
    assert in_steps.levels == tuple(
        replace(level, every_s=every_s[level.place]) for level in best.levels
    )
    found = mean_outcome(
        [simulate(cluster, in_steps, model, steps=100_000, seed=seed) for seed in range(100)]
    )
    lost = found.lost_s / found.training_s
    assert lost == pytest.approx(in_steps.expected.loss.total, rel=0.02)


# ---- against published runs


def test_54_days_of_16_384_gpus_take_under_a_minute_and_our_levels_lose_half_a_percent():
    preset = PRESETS["llama-3"]
    begun_s = time.process_time()
    systems = {name: build_system(name, preset.cluster, preset.faults) for name in NAMES}
    found = {
        name: simulate(preset.cluster, system, preset.faults, wall_s=54 * DAY_S)
        for name, system in systems.items()
    }
    assert time.process_time() - begun_s < 60.0  # all systems together
    ours = found["trainckpt"]
    assert sum(ours.faults.values()) == pytest.approx(419, rel=0.15)
    assert ours.lost_to_checkpoints_s / ours.wall_s <= 0.005
    assert ours.ettr >= 0.984
    assert found["synchronous"].ettr < ours.ettr - 0.1


def test_restarts_of_64_gpus_take_about_as_long_as_was_published():
    preset = PRESETS["h200-64"]
    system = build_system("async", preset.cluster, preset.faults, preset.every_s["async"])
    assert system.levels[0].every_steps == 100
    found = mean_outcome(
        [simulate(preset.cluster, system, preset.faults, steps=3000, seed=s) for s in range(50)]
    )
    assert found.wall_s / 60 == pytest.approx(818, rel=0.15)


# ---- event by event


def test_the_five_times_add_up_to_the_wall_time_and_a_seed_repeats_a_run():
    model = faults(rank=900.0, host=2000.0, store=3000.0)
    system = build_system("trainckpt", SMALL, model)
    first, again = (simulate(SMALL, system, model, wall_s=50_000.0, seed=7) for _ in range(2))
    assert first == again
    assert first.wall_s == pytest.approx(50_000.0)
    assert first.rework_s >= 0.0
    assert simulate(SMALL, system, model, wall_s=50_000.0, seed=8) != first


def test_without_faults_only_stalls_are_lost():
    system = build_system("synchronous", SMALL, faults(rank=36_000.0), {SHARED: 141.0})
    (level,) = system.levels
    found = simulate(SMALL, system, struck((1e9, RANK)), steps=1000)
    assert found.lost_s == pytest.approx((999 // level.every_steps) * level.stall_s)
    assert (found.steps, found.rework_s, found.downtime_s) == (1000, 0.0, 0.0)


def test_a_fault_loses_what_came_after_the_newest_snapshot_that_survives_it():
    near = SavedLevel(place=MEMORY, stall_s=0.0, copy_s=0.0, restore_s=2.0, every_steps=10)
    partner = replace(near, place=PARTNER, restore_s=3.0, copy_s=4.0)
    store = replace(near, place=SHARED, restore_s=5.0, every_steps=100)
    system = with_levels(SMALL, near, partner, store)

    of_rank = simulate(SMALL, system, struck((237.5, RANK)), steps=300)
    assert of_rank.restores == {MEMORY: 1}
    assert of_rank.rework_s == pytest.approx(7.5)
    assert (of_rank.restore_s, of_rank.downtime_s) == (pytest.approx(2.0), pytest.approx(30.0))

    of_host = simulate(SMALL, system, struck((232.5, HOST)), steps=300)
    assert of_host.restores == {PARTNER: 1}
    assert of_host.rework_s == pytest.approx(12.5)  # the copy of step 230 was under way
    assert of_host.downtime_s == pytest.approx(100.0)

    of_all = simulate(SMALL, system, struck((237.5, CLUSTER)), steps=300)
    assert of_all.restores == {SHARED: 1}
    assert of_all.rework_s == pytest.approx(137.5)  # step 200's copy takes 40 s
    assert of_all.restore_s == pytest.approx(5.0 + 40.0)

    at_once = simulate(SMALL, system, struck((5.0, CLUSTER)), steps=300)
    assert at_once.restores == {START: 1}
    assert at_once.rework_s == pytest.approx(5.0)


def test_a_partner_lies_under_another_switch_where_there_are_two():
    near = SavedLevel(place=PARTNER, stall_s=0.0, copy_s=0.0, restore_s=3.0, every_steps=10)
    store = replace(near, place=SHARED, every_steps=100)
    one_switch = replace(SMALL, hosts_per_switch=8)
    for cluster, place in ((SMALL, PARTNER), (one_switch, SHARED)):
        system = with_levels(cluster, near, store)
        found = simulate(cluster, system, struck((237.5, SWITCH)), steps=300)
        assert found.restores == {place: 1}


def test_a_fault_while_a_run_restarts_makes_it_restart_again():
    near = SavedLevel(place=MEMORY, stall_s=0.0, copy_s=0.0, restore_s=2.0, every_steps=10)
    store = replace(near, place=SHARED, every_steps=100)
    system = with_levels(SMALL, near, store)
    found = simulate(SMALL, system, struck((55.0, RANK), (75.0, RANK)), steps=100)
    assert found.faults == {RANK: 2}
    assert found.restores == {MEMORY: 1}
    assert found.downtime_s == pytest.approx(20.0 + 30.0)


def test_without_a_spare_a_run_waits_until_a_host_is_repaired():
    cluster = replace(SMALL, spares=1, repair_s=5000.0)
    system = build_system("trainckpt", cluster, faults(host=1e5))
    found = simulate(cluster, system, struck((500.0, HOST), (900.0, HOST)), steps=3000)
    assert found.downtime_s == pytest.approx(100.0 + (5500.0 - 900.0) + 100.0)


def test_a_store_that_fails_holds_up_copies_and_restores_but_not_training():
    cluster = replace(SMALL, outage_s=1000.0)
    store = SavedLevel(place=SHARED, stall_s=0.0, copy_s=0.0, restore_s=0.0, every_steps=100)
    system = with_levels(cluster, store)
    found = simulate(cluster, system, struck((50.0, STORE), (120.0, RANK)), steps=300)
    assert found.restores == {START: 1}  # the copy of step 100 did not move
    assert found.rework_s == pytest.approx(120.0)

    held_up = simulate(cluster, system, struck((150.0, STORE), (180.0, RANK)), steps=300)
    assert held_up.restores == {SHARED: 1}
    assert held_up.restore_s == pytest.approx(1150.0 - 210.0 + 40.0)


def test_saves_and_restores_share_the_way_to_the_store():
    waits = SavedLevel(
        place=SHARED, stall_s=0.0, copy_s=0.0, restore_s=0.0, every_steps=10, waits=True
    )
    found = simulate(SMALL, with_levels(SMALL, waits), struck((1e9, RANK)), steps=100)
    assert found.stall_s == pytest.approx(9 * (40.0 - 10.0))  # each save waits for the one before


def test_a_weibull_shape_leaves_the_mean_and_clusters_the_faults():
    for shape in (0.7, 1.0):
        drawn = list(islice(FaultModel(means_s={HOST: 100.0}, shape=shape).draw(Random(1)), 40_000))
        gaps = [b.at_s - a.at_s for a, b in pairwise(drawn)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(100.0, rel=0.03)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        assert (spread > 1.2) == (shape < 1.0)
