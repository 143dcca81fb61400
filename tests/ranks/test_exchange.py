"""Bytes between real ranks: each gets what was sent to it; who is gone or late is an error."""

from __future__ import annotations

from tests.ranks import programs
from tests.ranks.processes import run_ranks


def test_every_member_gets_what_was_sent_to_it_whatever_its_length():
    for sent in run_ranks(programs.swap, 3):
        assert sent == [0, 1, 4096, 3_000_001]


def test_a_member_that_does_not_come_is_an_error_to_those_who_wait_for_it():
    one, two, three = run_ranks(programs.swap_with_one_that_does_not_come, 3)
    assert two == "left in peace"
    for told in (one, three):
        assert told.startswith("NoAgreement: rank ")
        assert "lost one of [0, 1, 2]" in told


def test_members_that_cannot_meet_are_told_so():
    told = run_ranks(programs.meet_without_one, 2)
    assert told[0].startswith("NoAgreement: rank 0 could not reach ranks [0, 1]")
    assert told[1] == "left in peace"
