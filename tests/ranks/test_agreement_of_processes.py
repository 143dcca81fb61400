"""Real processes, real signals, a real store: all ranks act at the same boundary."""

from __future__ import annotations

import pytest

from tests.ranks import programs
from tests.ranks.processes import run_ranks


@pytest.mark.parametrize("coupled", [False, True])
def test_a_signal_to_one_of_three_ranks_stops_all_at_the_same_boundary(coupled):
    """Ranks run at uneven speed, with or without a collective in each micro-batch."""
    dues = run_ranks(programs.train_until_signalled, 3, coupled, {1: 5})
    assert dues[0] == dues[1] == dues[2]
    ((passed, action, reason, _, _),) = dues[0]
    assert (passed >= 5, action, reason) == (True, "stop", "SIGTERM")


def test_two_ranks_signalled_at_once_stop_with_all_others_once():
    """The notices meet in one round, or the later one finds a stop as strict as itself."""
    dues = run_ranks(programs.train_until_signalled, 3, False, {0: 4, 2: 4})
    assert dues[0] == dues[1] == dues[2]
    assert [action for _, action, *_ in dues[0]] == ["stop"]


def test_a_save_asked_for_by_one_rank_is_taken_by_all_and_a_later_stop_too():
    """Both at one boundary each, on all ranks."""
    dues = run_ranks(programs.save_on_one_then_stop_on_another, 3)
    assert dues[0] == dues[1] == dues[2]
    assert [due[1:] for due in dues[0]] == [
        ("save", "ckpt.save()", 1, "best"),
        ("stop", "SIGTERM", None, None),
    ]


def test_the_same_call_of_save_on_every_rank_is_one_save():
    """Three ranks call twice: two saves, each at one boundary."""
    dues = run_ranks(programs.save_on_all, 3)
    assert dues[0] == dues[1] == dues[2]
    assert [(number, tag) for _, _, _, number, tag in dues[0]] == [(1, "all"), (2, "all")]


def test_a_rank_that_left_is_not_waited_for():
    """It published its final count, which is its answer to every later round."""
    final, *dues = run_ranks(programs.one_leaves_early, 3)
    assert dues[0] == dues[1]
    ((passed, action, *_),) = dues[0]
    assert (passed >= final, action) == (True, "stop")


def test_a_stop_that_one_rank_does_not_answer_ends_the_others_with_71():
    """The ranks read one decision, "failed"; none acts on its own timer."""
    results = run_ranks(programs.one_does_not_answer, 3)
    assert results == [("exit", 71), ("exit", 71), "left in peace"]


def test_values_are_gathered_in_the_order_of_ranks_and_one_proposal_wins():
    """Over the default process group, as the owner uses the channel."""
    results = run_ranks(programs.brings_its_rank, 3)
    assert [everyone for everyone, _ in results] == [[{"i am": rank} for rank in range(3)]] * 3
    assert len({winner for _, winner in results}) == 1
