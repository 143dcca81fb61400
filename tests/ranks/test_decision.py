"""The pure part of the agreement: what follows from the publications of a round."""

from __future__ import annotations

import json

import pytest

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.ranks.decision import Decision, Publication, decide, decide_without

STOP = Notice("SIGTERM", "stop", "micro-batch")
WINDOW = Notice("wall time", "stop", "window", seconds_left=60.0)
SAVE = Notice("every 5 min", "save", "micro-batch")


def published(*answers):
    """Publications of round 1 by ranks 0, 1, ...: (passed, notice), with can_save or without."""
    return [
        Publication(1, rank, passed, can_save[0] if can_save else True, notice)
        for rank, (passed, notice, *can_save) in enumerate(answers)
    ]


def test_the_bound_is_the_largest_count_published():
    """Nobody is asked to stop at a boundary that some rank has passed already."""
    assert decide(published((7, None), (9, STOP), (8, None))).bound == 9


def test_a_stop_goes_before_a_save():
    """A stop saves anyway, so the save is part of it."""
    assert decide(published((1, SAVE), (1, WINDOW))).stops


def test_the_strictest_mode_and_the_smallest_time_left_win():
    """They may come from different ranks."""
    decision = decide(published((1, WINDOW), (1, STOP)))
    assert (decision.notice.mode, decision.notice.seconds_left) == ("micro-batch", 60.0)


def test_a_save_is_skipped_unless_every_rank_can_save():
    """One rank without a free arena, and all skip; the reason names it."""
    decision = decide(published((1, SAVE), (1, None, False)))
    assert decision.failed
    assert decision.why == "rank 1 cannot save now"


def test_a_stop_does_not_ask_whether_ranks_can_save():
    """A stop waits for memory if it has to; it is never skipped."""
    assert not decide(published((1, STOP), (1, None, False))).failed


def test_of_several_numbered_saves_the_lowest_is_taken_with_its_own_tag():
    """Each call of ckpt.save() keeps its tag; later ones get later rounds."""
    second = Notice("ckpt.save()", "save", tag="last", number=2)
    first = Notice("ckpt.save()", "save", tag="best", number=1)
    decision = decide(published((1, second), (1, first), (1, SAVE)))
    assert (decision.notice.number, decision.notice.tag) == (1, "best")


def test_the_order_of_publications_does_not_matter():
    """Any rank may decide: all must come to the same."""
    answers = published((3, SAVE), (5, WINDOW), (4, STOP))
    assert decide(answers) == decide(answers[::-1])


def test_a_round_without_any_notice_is_a_save_that_fails():
    """Nothing is done where nobody asks for anything."""
    decision = decide(published((1, None), (1, None)))
    assert (decision.notice.action, decision.failed) == ("save", True)


@pytest.mark.parametrize("notice", [STOP, SAVE])
def test_a_round_whose_time_ran_out_fails_and_names_the_silent_ranks(notice):
    """A missing answer fails the round; the action is that of the answers there are."""
    decision = decide_without(published((4, notice)), 3, 1)
    assert (decision.failed, decision.notice.action) == (True, notice.action)
    assert decision.why == "no answer from rank 1, 2 in time"


def test_a_failed_round_is_one_even_if_no_answer_was_found():
    """Nobody answered: a save that all skip."""
    assert decide_without([], 2, 7) == Decision(
        7, 0, Notice("", "save", "micro-batch"), failed=True, why="no answer from rank 0, 1 in time"
    )


@pytest.mark.parametrize("notice", [STOP, WINDOW, SAVE, None])
def test_publications_and_decisions_survive_the_journey_as_json(notice):
    """What is written is what is read."""
    publication = Publication(3, 1, 12, can_save=False, notice=notice, settled=2)
    assert Publication.from_json(json.loads(json.dumps(publication.as_json()))) == publication
    decision = decide([publication])
    assert Decision.from_json(json.loads(json.dumps(decision.as_json()))) == decision


@pytest.mark.parametrize(
    "change",
    [
        {"passed": -1},
        {"passed": "3"},
        {"round": None},
        {"wish": {"reason": "x", "action": "explode"}},
        {"wish": "stop"},
        {"wish": {**STOP.__dict__, "mode": "never"}},
        {"wish": {**STOP.__dict__, "seconds_left": "soon"}},
        {"wish": {**STOP.__dict__, "reason": 3}},
    ],
)
def test_a_damaged_publication_is_refused(change):
    """Values of other ranks are checked when they are read."""
    with pytest.raises(NoAgreement):
        Publication.from_json({**Publication(1, 0, 0).as_json(), **change})


@pytest.mark.parametrize("value", [None, 3, [], "decision", {}])
def test_a_value_that_is_no_publication_is_refused(value):
    """Anything may lie in a store."""
    with pytest.raises(NoAgreement):
        Publication.from_json(value)
