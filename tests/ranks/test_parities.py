"""Copies and parities between real ranks, and files made again of what is left of them."""

from __future__ import annotations

from tests.ranks import parities
from tests.ranks.processes import run_ranks


def test_whatever_members_of_a_set_are_lost_their_files_are_made_again():
    assert run_ranks(parities.keep_and_recover, 5) == [{1: 5, 2: 10, 3: 10}] * 5


def test_each_rank_keeps_the_file_of_another():
    assert run_ranks(parities.copy_in_a_ring, 5) == [True] * 5


def test_who_waits_for_a_member_that_is_gone_or_hangs_is_told_so():
    for how, ends in (("killed", ("exit", 9)), ("wants the network", "something more urgent")):
        one, two, three = run_ranks(parities.lose_one, 3, how)
        assert two == ends
        assert {one, three} <= {
            "rank 0 lost one of [0, 1, 2]",
            "rank 2 lost one of [0, 1, 2]",
            "rank 0 could not send to its members",
            "rank 2 could not send to its members",
        }
    one, _, three = run_ranks(parities.lose_one, 3, "hangs")
    assert (one, three) == ("rank 0 lost one of [0, 1, 2]", "rank 2 lost one of [0, 1, 2]")
