"""When a save is due: by steps, the same on all ranks; by time, with the time passed in."""

from __future__ import annotations

from trainckpt.attempt.options import Every
from trainckpt.save.schedule import SaveSchedule


def due(policy, places):
    """The (step, micro) at which a save is due, in the order of boundaries."""
    return [place for place in places if policy.due_by_steps(*place)]


def test_a_save_is_due_once_at_each_multiple_and_only_between_windows():
    places = [(step, micro) for step in range(7) for micro in range(3)]
    assert due(SaveSchedule(Every(steps=3, text="3 steps"), 0, 0.0), places) == [(3, 0), (6, 0)]


def test_a_multiple_that_was_passed_inside_a_window_is_made_up_for():
    assert due(SaveSchedule(Every(steps=3), 0, 0.0), [(2, 1), (4, 1), (5, 0), (6, 0)]) == [
        (5, 0),
        (6, 0),
    ]


def test_the_multiple_a_run_resumed_from_is_not_due_again():
    assert due(SaveSchedule(Every(steps=3), 3, 0.0), [(3, 0), (4, 0), (6, 0)]) == [(6, 0)]


def test_a_save_to_memory_is_due_where_none_to_the_place_is():
    policy = SaveSchedule(Every(steps=4), 0, 0.0, memory_every=Every(steps=2))
    found = {s: policy.is_in_memory for s in range(9) if policy.due_by_steps(s, 0)}
    assert found == {2: True, 4: False, 6: True, 8: False}
    by_time = SaveSchedule(Every(seconds=10), 0, 0.0, memory_every=Every(steps=2))
    assert due(by_time, [(1, 0), (2, 0), (2, 1)]) == [(2, 0)]
    assert by_time.due_by_time(10)
    assert not due(SaveSchedule(Every(), 0, 0.0, memory_every=Every()), [(10, 0)])


def test_time_counts_from_the_beginning_and_from_each_save():
    policy = SaveSchedule(Every(seconds=10, text="10 s"), 0, 100.0)
    assert [
        t for t in (100, 109.9, 110, 110.1, 119, 120.5, 130.4, 130.5) if policy.due_by_time(t)
    ] == [110, 120.5, 130.5]
    assert policy.reason == "every 10 s"
    assert not policy.due_by_steps(100, 0)


def test_never_is_never():
    policy = SaveSchedule(Every(), 0, 0.0)
    assert not policy.due_by_time(1e12)
    assert not policy.due_by_steps(10**9, 0)
