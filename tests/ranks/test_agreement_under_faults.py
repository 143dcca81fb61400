"""Real processes: uneven ranks, deadlines that differ, and a store whose host is killed."""

from __future__ import annotations

import pytest

from tests.ranks import fault_programs as programs
from tests.ranks.fault_programs import DECIDED, Moment
from tests.ranks.faults import Run
from tests.ranks.processes import run_ranks

WITHIN_S = 20  # a round may take that long

UNDECIDED = {
    "before the first publication": Moment("before", "put", "1/of/1"),
    "before the bells": Moment("before", "put_all", "bell/0/1"),
    "after the bells": Moment("after", "put_all", "bell/0/1"),
    "before an answer": Moment("before", "put", "1/of/0"),
    "before the decision": Moment("before", "propose", "1/decision"),
}


@pytest.mark.parametrize("told", [0, 2], ids=["the fast one", "the slow one"])
def test_ranks_of_very_uneven_speed_stop_at_one_boundary_whichever_is_told(told):
    """Rank 0 is 500 boundaries ahead of rank 2, which catches up."""
    first, *others = run_ranks(programs.train_unevenly, 3, told)
    assert others == [first, first]
    ((passed, action, *_),) = first
    assert (passed >= programs.AHEAD, action) == (True, "stop")


@pytest.mark.parametrize("deadlines", [(400, 100), (100, 400), (None, 100)], ids=str)
def test_of_two_notices_with_different_deadlines_the_smaller_holds_on_all_ranks(deadlines):
    """Also on the rank that was told the longer one, and on that which was told none."""
    run = Run(programs.stop_with_two_deadlines, 3, deadlines)
    assert [ended.code for ended in run.ended] == [0, 0, 0]
    assert len({ended.passed for ended in run.ended}) == 1
    assert all(0 < ended.seconds_left <= 100 for ended in run.ended)


@pytest.mark.parametrize("moment", UNDECIDED.values(), ids=list(UNDECIDED))
def test_a_stop_whose_store_dies_before_the_decision_ends_all_ranks_with_71(moment):
    """The launcher's signal reaches them all. Nobody waits for a decision that cannot come."""
    run = Run(programs.train_until_stopped, 3, moment, 1, signal_all=True)
    assert [ended.code for ended in run.ended] == [71, 71, 71]
    assert run.ended[1].published == 3
    for ended in run.ended:
        assert ended.published in (None, ended.passed), "it went on after it had published"
    assert run.seconds < WITHIN_S


def test_a_rank_that_has_read_the_decision_stops_although_the_store_dies_with_it():
    """The others stop at the same boundary, or end with 71 before it; nobody passes it."""
    run = Run(programs.train_until_stopped, 3, DECIDED, 1, signal_all=True)
    stopped = {ended.passed for ended in run.ended if ended.code == 0}
    assert {ended.code for ended in run.ended} <= {0, 71}
    assert len(stopped) == 1
    assert all(ended.passed <= max(stopped) for ended in run.ended)
    assert run.seconds < WITHIN_S


def test_a_stop_that_all_ranks_have_read_needs_no_store_any_more():
    """They leave in order, at one boundary."""
    run = Run(programs.stop_and_then_lose_the_store, 3, signal_all=True)
    assert [ended.code for ended in run.ended] == [0, 0, 0]
    assert len({ended.passed for ended in run.ended}) == 1
    assert run.seconds < WITHIN_S


def test_without_a_store_training_goes_on_until_a_decision_is_needed():
    """A hundred boundaries without one; then a stop is asked for, and 71 is the honest answer."""
    run = Run(programs.train_without_a_store, 3)
    assert [ended.code for ended in run.ended] == [71, 71, 71]
    assert all(ended.passed > 100 for ended in run.ended)
