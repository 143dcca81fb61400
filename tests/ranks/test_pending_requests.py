"""What a rank asks for, and when that needs a round."""

from __future__ import annotations

from trainckpt.notice import Notice
from trainckpt.ranks.decision import Decision
from trainckpt.ranks.pending_requests import PendingRequests

STOP = Notice("SIGTERM", "stop", "micro-batch")
WINDOW = Notice("wall time", "stop", "window")
SAVE = Notice("every 5 min", "save")


def numbered(number):
    return Notice("ckpt.save()", "save", number=number)


def saved(round_, number=None, **more):
    return Decision(round_, 0, Notice("", "save", number=number), **more)


def wanting(*requests):
    made = PendingRequests()
    for request in requests:
        made.add(request)
    return made


def test_a_stop_is_brought_at_once_and_a_save_waits_for_open_rounds():
    """A stop has no time; a save may be the very one that is being decided."""
    assert wanting(STOP).next_notice({1}) == STOP
    assert wanting(SAVE).next_notice({1}) is None
    assert wanting(SAVE).next_notice(()) == SAVE


def test_only_a_stricter_stop_is_asked_for_again():
    """The window's end was asked for, then time ran short."""
    requests = wanting(WINDOW)
    requests.published(1, WINDOW)
    requests.add(WINDOW)
    assert requests.next_notice({1}) is None
    requests.add(STOP)
    assert requests.next_notice({1}) == STOP


def test_a_stop_with_a_sooner_deadline_is_asked_for_again_and_keeps_the_strictest_mode():
    """First SIGTERM, then `pause --deadline`: what was decided first is not loosened."""
    requests = wanting(STOP)
    requests.published(1, STOP)
    requests.add(Notice("trainckpt pause", "stop", "window", seconds_left=60.0))
    brought = requests.next_notice({1})
    assert (brought.reason, brought.mode) == ("trainckpt pause", "micro-batch")
    assert 59 < brought.seconds_left <= 60


def test_a_deadline_that_is_hardly_sooner_or_later_opens_no_round():
    """Notices are repeated, and each repetition is a little off."""
    now = [100.0]
    requests = PendingRequests(clock=lambda: now[0])
    requests.add(Notice("wall time", "stop", "micro-batch", seconds_left=60.0))
    requests.published(1, requests.next_notice(()))
    for later, left in ((1.0, 58.5), (2.0, 90.0), (3.0, None)):
        now[0] = 100.0 + later
        requests.add(Notice("wall time", "stop", "micro-batch", seconds_left=left))
        assert requests.next_notice(()) is None
    requests.add(Notice("SIGTERM", "stop", "micro-batch", seconds_left=30.0))
    assert requests.next_notice(()).seconds_left == 30.0


def test_a_stop_decided_elsewhere_covers_our_own():
    """As strict as ours, so no second round."""
    requests = wanting()
    requests.on_decision(Decision(1, 0, Notice("", "stop", "micro-batch")))
    requests.add(STOP)
    assert requests.next_notice(()) is None


def test_a_stop_drops_saves():
    """It saves anyway."""
    requests = wanting(SAVE, numbered(1), STOP)
    requests.published(1, STOP)
    requests.on_decision(Decision(1, 0, Notice("", "stop", "micro-batch")))
    assert requests.next_notice(()) is None


def test_any_save_will_do_for_one_without_a_number():
    """It merges with whatever save was decided after it was asked for."""
    requests = wanting(SAVE)
    requests.on_decision(saved(1, number=1))
    assert requests.next_notice(()) is None


def test_a_numbered_save_is_asked_for_until_its_own_number_is_decided():
    """Save 1 does not cover save 2; a skipped one is settled too."""
    requests = wanting(numbered(1), numbered(2))
    requests.on_decision(saved(1, number=1))
    assert requests.next_notice(()) == numbered(2)
    requests.on_decision(saved(2, number=2, failed=True))
    requests.add(numbered(2))
    assert requests.next_notice(()) is None


def test_a_save_whose_round_ran_out_of_time_is_not_asked_for_for_ever():
    """It was skipped; the next one may do better."""
    requests = wanting(numbered(1))
    requests.published(1, numbered(1))
    requests.on_decision(saved(1, failed=True))
    assert requests.next_notice(()) is None


def test_a_stop_that_came_too_late_for_its_round_is_asked_for_again():
    """The round was given up as a save before our answer was there."""
    requests = wanting(STOP)
    requests.published(1, STOP)
    assert requests.next_notice(()) is None
    requests.on_decision(saved(1, failed=True))
    assert requests.next_notice(()) == STOP


def test_after_a_stop_was_undone_the_same_stop_is_a_new_one():
    requests = wanting(STOP)
    requests.published(1, STOP)
    requests.on_decision(Decision(1, 0, Notice("", "stop", "micro-batch", seconds_left=5.0)))
    requests.add(STOP)
    assert requests.next_notice(()) is None
    requests.forget_stop()
    requests.add(SAVE)
    assert requests.next_notice(()) == SAVE
    requests.add(STOP)
    assert requests.next_notice(()) == STOP
