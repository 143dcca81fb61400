"""No interleaving of the protocol ends in a deadlock, in two places, or with different saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.explorer.explore import explore
from tests.explorer.model import Rules, Setup
from tests.explorer.programs import SAVE, STOP, WINDOW_STOP, round_of, training
from tests.explorer.setups import protocol
from tests.long_cases import long_unless

TINY = training(1, "all")
SMALL = training(2, "all", window=2)
SMALL_AND_FREE = training(2, "none", window=2)


def two_ranks(program, *requests, timers=False, **rules):
    rounds = tuple(round_of(request, 2) for request in requests)
    return Setup("two ranks", (program, program), rounds, timers, Rules(**rules))


# Each kind of meeting, of program and of collective once, with timers and without.
EVERY_TIME = {
    "stop, all",
    "window stop, last",
    "save, none",
    "stop, ahead",
    "window stop, all, timers",
    "save, last, timers",
    "stop, none, timers",
    "window stop, ahead, timers",
    "two epochs, evaluation none, all",
    "two epochs, evaluation behind, last",
    "two epochs, evaluation unannounced, none",
    "two epochs, evaluation inside, ahead",
    "two epochs, evaluation none, none, timers",
    "two epochs, evaluation behind, all, timers",
    "two epochs, evaluation unannounced, all, timers",
    "two epochs, evaluation inside, none, timers",
    "epochs that end inside a window",
    "stop on one rank, all",
    "save on one rank, none",
    "save meets stop, all",
    "window stop meets stop, none",
    "stop on one rank, none, timers",
    "save on one rank, all, timers",
    "save meets stop, all, timers",
    "window stop meets stop, all, timers",
    "save that one rank cannot take, then stop",
    "window stop, then stop, all",
    "stop, then window stop, none",
    "save, then stop, all",
    "stop, then save, none",
    "window stop, then save, all",
    "save, then save, none",
    "window stop, then stop, none, 2 ranks, timers",
    "stop, then window stop, none, 2 ranks, timers",
    "save, then stop, none, 2 ranks, timers",
    "stop, then save, none, 2 ranks, timers",
    "window stop, then save, none, 2 ranks, timers",
    "save, then save, none, 2 ranks, timers",
    "rank 0 raises in 1, stop",
    "rank 0 raises in 2, stop",
    "rank 0 raises in 3, stop",
    "rank 0 raises in 2, save, then stop",
}


def can_be_asked(setup, action):
    return any(w and w.action == action for round_ in setup.rounds for w in round_.requests)


def first_is_a_possible_save(setup):
    first = setup.rounds[0]
    return all(first.can_save) and all(w is None or w.action == "save" for w in first.requests)


@pytest.mark.parametrize(
    "setup",
    long_unless(lambda setup: setup.name in EVERY_TIME, protocol()),
    ids=lambda setup: setup.name,
)
def test_all_ranks_stop_at_one_boundary_or_finish_or_end_with_71_and_take_the_same_saves(setup):
    """And each of these does happen, so that the exploration is not an empty one."""
    report = explore(setup)
    assert not report.faults, report.traces
    expected = {"finished"}
    if can_be_asked(setup, "stop"):
        expected |= {"stopped", "ended with 71"} if setup.timers else {"stopped"}
        assert 0 in report.stops
        assert len(report.stops) >= 3
    if first_is_a_possible_save(setup):
        assert len(report.saves) >= 3
    assert set(report.ends) == expected


def test_what_is_explored_every_time_is_there():
    assert {setup.name for setup in protocol()} >= EVERY_TIME


def test_a_stop_is_possible_at_every_boundary_up_to_the_one_of_close():
    """The bound may fall anywhere; what is not resumable is passed by."""
    inside = training(2, "all", window=2, evaluation="inside")
    assert explore(two_ranks(SMALL, STOP)).stops == {0, 1, 2, 3}
    assert explore(two_ranks(inside, STOP)).stops == {0, 2, 3, 4}


def test_a_window_stop_falls_on_ends_of_windows_only():
    """The boundaries behind 0 and 2 micro-batches, and that of close."""
    assert explore(two_ranks(SMALL, WINDOW_STOP)).stops == {0, 2, 3}


def test_a_save_after_a_stop_is_never_taken():
    """Whatever the ranks do in between."""
    assert explore(two_ranks(SMALL_AND_FREE, WINDOW_STOP, SAVE)).saves == set()


def test_a_save_that_one_rank_cannot_take_is_skipped_by_all():
    """No rank takes it."""
    setup = two_ranks(SMALL_AND_FREE, SAVE)
    unable = replace(setup, rounds=(round_of(SAVE, 2, unable=[1]),))
    assert explore(setup).saves
    assert explore(unable).saves == set()


@pytest.mark.parametrize(
    "setup",
    [
        two_ranks(SMALL_AND_FREE, STOP, timers=True),
        two_ranks(SMALL_AND_FREE, WINDOW_STOP, STOP),
        two_ranks(SMALL_AND_FREE, SAVE, STOP),
        pytest.param(two_ranks(TINY, SAVE, STOP, timers=True), marks=pytest.mark.long),
    ],
    ids=["stop, timers", "stop, stop", "save, stop", "save, stop, timers"],
)
def test_the_reduced_search_finds_every_end_that_the_full_one_finds(setup):
    """What is left out makes no difference."""
    reduced, full = explore(setup), explore(setup, reduced=False)  # full: 10 to 50 times as much
    assert reduced.states < full.states / 2
    assert not reduced.faults
    assert not full.faults
    assert set(reduced.ends) == set(full.ends)
    assert (reduced.stops, reduced.saves) == (full.stops, full.saves)


def test_a_rank_that_learns_late_of_the_commit_may_end_with_71_but_only_after_it():
    """The one thing that stays: the stop failed, and the final snapshot was committed anyway."""
    setup = two_ranks(SMALL, STOP, timers=True, commit_ends_it=False)
    report = explore(setup, reduced=False)
    assert set(report.faults) == {"ended after the commit"}
    assert set(report.ends) == {"stopped", "finished", "ended with 71"}
