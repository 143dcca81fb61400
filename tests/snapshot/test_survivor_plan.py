"""What survivors save: a decision over what each of them reports."""

from __future__ import annotations

from trainckpt.snapshot.survivor_plan import SurvivorDecision, SurvivorHoldings, decide

PLACES = {step: (0, step, 0, step, 0) for step in range(20)}


def has(step, *files, whole=False, carried=False, samples=("same",)):
    return SurvivorHoldings(PLACES[step], files, whole, carried, samples)


def decided(*reports, world=4, is_all=False):
    return decide(dict(reports), world, is_all=is_all)


def test_the_newest_moment_of_which_there_is_every_file_is_saved():
    found = decided(
        (0, [has(8, 0, 3), has(9, 0)]), (1, [has(8, 1), has(9, 1)]), (2, [has(8, 2), has(9, 2)])
    )
    assert found == SurvivorDecision(PLACES[8], (0, 1, 2, 0))
    newer = decided(
        (0, [has(8, 0, 3), has(9, 0, 3)]), (1, [has(9, 1)]), (2, [has(8, 2), has(9, 2)])
    )
    assert newer == SurvivorDecision(PLACES[9], (0, 1, 2, 0))


def test_a_rank_writes_its_own_file_if_it_can():
    found = decided((0, [has(5, 0, 1)]), (1, [has(5, 1, 0)]), world=2)
    assert found.writers == (0, 1)


def test_as_long_as_more_may_report_nothing_is_saved_without_a_rank_s_own_state():
    reports = [(0, [has(5, 0, whole=True)]), (1, [has(5, 1)])]
    assert decided(*reports, world=3) is None
    assert decided(*reports, world=3, is_all=True) == SurvivorDecision(
        PLACES[5], (0, 1, 0), lost=(2,)
    )


def test_an_older_moment_with_all_files_goes_before_a_newer_one_without():
    reports = [(0, [has(4, 0, 1), has(5, 0, whole=True)])]
    assert decided(*reports, world=2, is_all=True).place == PLACES[4]


def test_ranks_at_another_step_count_as_lost_with_what_was_their_own():
    reports = [(0, [has(5, 0, whole=True)]), (1, [has(6, 1, whole=True)]), (2, [has(6, 2)])]
    found = decided(*reports, is_all=True)
    assert found == SurvivorDecision(PLACES[6], (1, 1, 2, 1), lost=(0, 3))


def test_what_no_rank_holds_whole_is_never_saved():
    assert decided((0, [has(5, 0)]), (1, []), world=3, is_all=True) is None
    assert decided(world=3, is_all=True) is None


def test_a_moment_whose_replicas_have_drifted_apart_is_never_saved():
    apart = [(0, [has(5, 0), has(6, 0)]), (1, [has(5, 1, 2), has(6, 1, 2, samples=("a", "same"))])]
    assert decided(*apart, world=3) == SurvivorDecision(PLACES[5], (0, 1, 1))
    whole = [(0, [has(5, 0, whole=True)]), (1, [has(5, 1, whole=True, samples=("other",))])]
    assert decided(*whole, world=3, is_all=True) is None


def test_gradients_that_may_have_counted_are_told():
    reports = [(0, [has(5, 0, carried=True)]), (1, [has(5, 1)])]
    assert decided(*reports, world=2).carried


def test_both_come_back_as_they_were():
    told = has(5, 0, 3, whole=True, carried=True)
    assert SurvivorHoldings.from_json(told.to_json()) == told
    decision = SurvivorDecision(PLACES[5], (0, 1, 0), (2,), carried=True)
    assert SurvivorDecision.from_json(decision.to_json()) == decision
