"""The boundary's side of the agreement, one rank, decisions handed in."""

from __future__ import annotations

import threading

import pytest

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.ranks import BoundaryGate, Decision


def stop(round_, bound, mode="micro-batch", seconds_left=None, **more):
    return Decision(round_, bound, Notice("", "stop", mode, seconds_left), **more)


def save(round_, bound, tag=None, number=None, **more):
    return Decision(round_, bound, Notice("", "save", tag=tag, number=number), **more)


def after(passed, *decisions, clock=lambda: 0.0):
    """An agreement that has passed some boundaries, with decided rounds."""
    gate = BoundaryGate(clock)
    for _ in range(passed):
        assert gate.at_boundary() is None
    for decision in decisions:
        gate.open_round(decision.round)
        gate.decided(decision)
    return gate


def boundaries_until_due(gate, **at):
    """How many boundaries are passed before something is due, and what."""
    for passed in range(20):
        due = gate.at_boundary(**at)
        if due is not None:
            return passed, due
    raise AssertionError("nothing was ever due")


def in_background(call):
    """Run `call` in a thread; returns the thread and the list its result lands in."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_boundaries_are_counted_while_nothing_is_open():
    """The steady state."""
    assert after(5).passed == 5


def test_a_stop_is_due_at_the_first_boundary_beyond_the_bound():
    """Bound 5, three passed: two more are passed, the next is where all stop."""
    gate = after(3, stop(1, 5))
    passed, due = boundaries_until_due(gate)
    assert (passed, due.notice.action, gate.passed) == (2, "stop", 5)


def test_a_stop_stays_due():
    """A rank that asks again is told again, and its count does not rise."""
    gate = after(2, stop(1, 2))
    assert gate.at_boundary() == gate.at_boundary()
    assert gate.passed == 2


def test_a_save_is_due_until_its_round_is_closed_and_then_the_boundary_is_passed():
    """Save, close, ask again: the count rises by one."""
    gate = after(2, save(1, 2, tag="best", number=4))
    due = gate.at_boundary()
    assert (due.notice.action, due.notice.tag, due.notice.number) == ("save", "best", 4)
    assert gate.at_boundary() == due
    gate.close_round(due.round)
    assert gate.at_boundary() is None
    assert gate.passed == 3


def test_saves_come_oldest_first_and_before_the_stop():
    """Several rounds may be due at one boundary."""
    gate = after(2, save(1, 1), save(2, 2), stop(3, 2))
    seen = []
    while not (due := gate.at_boundary()).stops:
        seen.append(due.round)
        gate.close_round(due.round)
    assert (seen, due.round) == ([1, 2], 3)


def test_a_save_after_a_stop_is_never_taken():
    """It is reported as skipped, so that whoever waits for it is told."""
    gate = after(0, stop(1, 2, mode="window"), save(2, 0))
    assert gate.at_boundary() is None
    assert [decision.round for decision in gate.skipped()] == [2]
    assert gate.skipped() == []


def test_a_save_after_a_stop_stays_void_when_a_newer_stop_replaces_that_stop():
    """The newer stop does not bring it back."""
    gate = after(0, stop(1, 0, mode="window"), save(2, 0), stop(3, 0))
    assert gate.at_boundary().round == 3


def test_a_failed_save_is_skipped():
    """Training goes on, and the reason can be read."""
    gate = after(3, save(1, 3, failed=True, why="rank 2 cannot save now"))
    assert gate.at_boundary() is None
    assert [decision.why for decision in gate.skipped()] == ["rank 2 cannot save now"]


def test_a_newer_stop_replaces_an_older_one():
    """First the window's end, then, as time runs short, the next micro-batch."""
    gate = after(1, stop(1, 1, mode="window"))
    assert gate.at_boundary(window_end=False) is None
    gate.open_round(2)
    gate.decided(stop(2, 2))
    assert gate.at_boundary(window_end=False).round == 2


def test_a_newer_stop_never_loosens_an_older_one():
    """A rank that has acted on the micro-batch stop already would be left behind."""
    gate = after(1, stop(1, 1))
    gate.open_round(2)
    gate.decided(stop(2, 1, mode="window", seconds_left=5.0))
    due = gate.at_boundary(window_end=False)
    assert (due.round, due.notice.mode) == (2, "micro-batch")


def test_a_stop_in_mode_window_waits_for_a_window_that_ends_beyond_the_bound():
    """A window's end before the bound does not count."""
    gate = after(0, stop(1, 2, mode="window"))
    ends = [True, False, False, False, True]
    dues = [gate.at_boundary(window_end=end) for end in ends]
    assert [due is not None for due in dues] == [False, False, False, False, True]


def test_a_stop_in_mode_micro_batch_does_not_wait_for_a_window():
    """Gradients of the window are kept instead."""
    assert after(0, stop(1, 0)).at_boundary(window_end=False).notice.action == "stop"


@pytest.mark.parametrize("decision", [stop(1, 1), save(1, 1)])
def test_what_is_due_where_no_resume_is_possible_is_done_at_the_next_boundary(decision):
    """A boundary inside an evaluation is counted, and nothing is done there."""
    gate = after(1, decision)
    assert gate.at_boundary(resumable=False) is None
    assert gate.passed == 2
    assert gate.at_boundary().notice.action == decision.notice.action


def test_main_waits_at_a_boundary_that_is_not_resumable_too_while_a_round_is_undecided():
    """It has published its count: to pass would make that count a lie."""
    gate = after(1)
    assert gate.open_round(1) == 1
    thread, results = in_background(lambda: gate.at_boundary(resumable=False))
    thread.join(0.05)
    assert thread.is_alive()
    gate.decided(stop(1, 1))
    thread.join(5)
    assert results == [None]
    assert gate.passed == 2


def test_main_waits_for_the_decision_of_every_open_round():
    """One decided round is not enough."""
    gate = after(4)
    gate.open_round(1)
    gate.open_round(2)
    gate.decided(save(1, 9))
    thread, results = in_background(gate.at_boundary)
    thread.join(0.05)
    assert thread.is_alive()
    assert gate.passed == 4
    gate.decided(stop(2, 4))
    thread.join(5)
    assert results[0].round == 2


def test_a_round_opened_again_publishes_no_other_decision():
    """Repeated notices and repeated decisions change nothing."""
    gate = after(2, stop(1, 2))
    gate.open_round(1)
    gate.decided(stop(1, 50))
    assert gate.at_boundary().notice.action == "stop"


def test_after_finish_decisions_are_ignored_and_nothing_is_counted():
    """The final snapshot is committed: the attempt is over."""
    gate = after(3, stop(1, 3))
    assert gate.finish() == 3
    gate.open_round(2)
    gate.decided(stop(2, 3, failed=True))
    assert gate.at_boundary() is None
    assert gate.passed == 3


def test_finish_releases_a_main_that_waits():
    """Nobody waits for a decision that does not matter any more."""
    gate = after(1)
    gate.open_round(1)
    thread, results = in_background(gate.at_boundary)
    gate.finish()
    thread.join(5)
    assert results == [None]


def test_a_failed_stop_is_an_error_if_main_gets_that_far():
    """The watcher ends the process; main must not train on meanwhile."""
    gate = after(1, stop(1, 1, failed=True, why="no answer from rank 2 in time"))
    with pytest.raises(NoAgreement, match="rank 2"):
        gate.at_boundary()


def test_a_lost_store_is_an_error_only_where_a_decision_is_needed():
    """Training goes on without a store, until somebody has to agree."""
    gate = after(1)
    gate.broken(NoAgreement("the store is gone"))
    assert gate.at_boundary() is None
    gate.open_round(1)
    with pytest.raises(NoAgreement, match="the store is gone"):
        gate.at_boundary()


def test_the_time_left_is_counted_from_when_the_round_was_opened():
    """Seconds that pass before the boundary are no longer left."""
    now = [100.0]
    gate = after(0, stop(1, 0, seconds_left=30.0), clock=lambda: now[0])
    now[0] = 112.0
    assert gate.at_boundary().notice.seconds_left == 18.0
    now[0] = 200.0
    assert gate.at_boundary().notice.seconds_left == 0.0


def test_a_stop_that_is_undone_is_no_more_known_and_later_rounds_stand():
    """Rank A has acted on round 2, rank B on round 1 and hears of round 2 only afterwards."""
    a = after(3, stop(1, 2, mode="micro-batch"), stop(2, 2))
    b = after(3, stop(1, 2, mode="micro-batch"))
    assert (a.at_boundary().round, b.at_boundary().round) == (2, 1)
    for gate in (a, b):
        gate.forget_stop(2)
    b.open_round(2)
    b.decided(stop(2, 2))
    for gate in (a, b):
        gate.open_round(3)
        gate.decided(save(3, 9))
        passed, due = boundaries_until_due(gate)
        assert (passed, due.notice.action, due.round) == (6, "save", 3)
        gate.close_round(3)
        gate.open_round(4)
        gate.decided(stop(4, 9, mode="window"))
        assert gate.at_boundary(window_end=False) is None, "the mode is the new stop's"
        assert gate.at_boundary(window_end=True).round == 4
