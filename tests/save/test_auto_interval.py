"""How often a run saves when nobody says, from what was measured."""

from __future__ import annotations

import math

import pytest

from trainckpt.attempt.options import read_options
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED, AttemptRecord
from trainckpt.planning.run_history import PRIOR_S, mean_time_between_failures_s
from trainckpt.save.schedule import (
    FIRST_S,
    LEAST_S,
    MOST_S,
    SaveSchedule,
    interval_s,
)


def ended(number, how, seconds):
    outcome = None if how is None else {"outcome": how, "seconds": seconds}
    return AttemptRecord(number, outcome=outcome)


def test_it_is_youngs_where_nothing_else_binds():
    assert interval_s(0.5, 2.0, 3600.0) == pytest.approx(math.sqrt(2 * 0.5 * 3600.0))


def test_before_anything_was_measured_a_save_comes_soon():
    assert interval_s(None, None, PRIOR_S) == FIRST_S


def test_saves_never_cost_more_than_their_share_nor_follow_each_other_without_a_pause():
    assert interval_s(1.0, 1.0, 100.0) == 100.0  # 1 % of the time
    assert interval_s(0.001, 60.0, 100.0) == 120.0  # half of the time
    assert interval_s(0.0, 0.0, 100.0) == LEAST_S
    assert interval_s(10.0, 20.0, 1e9) == MOST_S


def test_only_what_was_not_saved_counts_as_a_failure():
    assert mean_time_between_failures_s([]) == PRIOR_S
    calm = [ended(1, STOPPED, 3600.0), ended(2, FINISHED, 3600.0)]
    assert mean_time_between_failures_s(calm) == PRIOR_S + 7200.0
    bad = [ended(1, FAILED, 60.0), ended(2, KILLED, 60.0), ended(3, None, None)]
    assert mean_time_between_failures_s(bad) == (PRIOR_S + 120.0) / 4


def test_each_interval_of_auto_follows_from_what_was_measured_before_it():
    intervals = iter([60.0, 10.0, 5.0, 7.0])
    policy = SaveSchedule(read_options({"every": "auto"}).every, 0, 1000.0, lambda: next(intervals))
    due = [t for t in (1059, 1060, 1069, 1070, 1074, 1075, 1081) if policy.due_by_time(t)]
    assert due == [1060, 1070, 1075]
    assert next(intervals, None) is None
