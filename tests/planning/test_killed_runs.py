"""The advice and the simulator against real runs whose attempts are killed: some minutes."""

from __future__ import annotations

import pytest
from benchmarks.planning.__main__ import FEATURES, replay, try_intervals

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("features", FEATURES)
def test_no_other_of_nine_intervals_loses_a_tenth_less_than_the_advised_one(features, tmp_path):
    found = try_intervals(features, 9, tmp_path)
    assert len(found["tried"]) >= 9
    assert found["above_least"] <= 0.1


def test_the_simulator_predicts_what_twenty_killed_runs_lose(tmp_path):
    found = replay(20, tmp_path)
    assert sum(len(run["kills_s"]) for run in found["runs"]) >= 50
    assert abs(found["difference"]) <= 0.1
