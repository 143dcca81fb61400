"""No more reads are on their way than bring something."""

from __future__ import annotations

from trainckpt.tiers.queue_depth import ENOUGH, FIRST, RESTS, QueueDepth


def depths(place, windows, most=16):
    """How many are on their way in each window, where `place` says the rate for a number."""
    depth = QueueDepth(most)
    found = []
    for _ in range(windows):
        found.append(depth.now)
        depth.measured(place(depth.now))
    return found


def test_a_fast_disk_never_has_more_than_the_first_few():
    assert depths(lambda number: 1e9 * number, 50) == [FIRST] * 50


def test_a_place_that_answers_late_has_as_many_as_there_may_be():
    assert depths(lambda number: 30e6 * number, 6) == [2, 4, 8, 16, 16, 16]


def test_a_slow_disk_is_asked_for_more_once_in_a_while_in_vain():
    found = depths(lambda _: 100e6, 2 * (RESTS + 2))
    assert found == ([2, 4] + [2] * RESTS) * 2


def test_a_place_that_is_fast_enough_with_some_gets_no_more():
    found = depths(lambda number: ENOUGH / 8 * number, 6)
    assert found == [2, 4, 8, 8, 8, 8]


def test_one_block_is_one_read():
    assert depths(lambda _: 1e6, 3, most=1) == [1, 1, 1]


def test_what_has_grown_by_chance_or_for_a_while_shrinks_again():
    depth = QueueDepth(16)
    for _ in range(6):
        depth.measured(30e6 * depth.now)
    assert depth.now == 16
    found = []
    for _ in range(40):
        found.append(depth.now)
        depth.measured(300e6)
    assert found.index(FIRST) < 4 * (RESTS + 2)


def test_what_pays_is_kept_though_half_of_it_is_tried_now_and_then():
    found = depths(lambda number: 30e6 * number, 100)
    assert found[3:].count(16) >= 85
    assert found[3:].count(8) >= 3
    assert set(found[3:]) == {8, 16}


def test_how_much_is_enough_may_be_said():
    depth = QueueDepth(8, enough=1e6)
    depth.measured(1e6)
    assert depth.now == FIRST
