"""The handle of a save: moments, failures, and waiting that would never end."""

from __future__ import annotations

import threading

import pytest

from trainckpt.attempt.save_handle import COMMITTED, DURABLE, STAGED, SaveHandle
from trainckpt.errors import ConfigurationError, SaveFailed


def test_a_moment_that_was_reached_is_not_waited_for():
    pending = SaveHandle()
    pending.reach(STAGED, "s1~1.1")
    assert pending.wait("staged") is pending
    with pytest.raises(TimeoutError, match="local after"):
        pending.wait("local", timeout_s=0.01)
    pending.reach(COMMITTED)
    assert pending.wait("local").snapshot == "s1~1.1"
    assert pending.ended
    with pytest.raises(TimeoutError, match="durable after"):
        pending.wait("durable", timeout_s=0.01)
    pending.reach(DURABLE)
    assert pending.wait("durable") is pending


def test_a_copy_that_failed_is_told_once_and_the_next_try_waited_for():
    pending = SaveHandle()
    pending.reach(COMMITTED, "s1~1.1")
    pending.fail_durable(SaveFailed("full"))
    with pytest.raises(SaveFailed, match="full"):
        pending.wait("durable")
    with pytest.raises(TimeoutError):
        pending.wait("durable", timeout_s=0.01)
    pending.reach(DURABLE)
    assert pending.wait("durable").wait("local") is pending


def test_what_will_never_be_copied_is_told_each_time():
    pending = SaveHandle()
    pending.reach(COMMITTED, "s1~1.1")
    pending.fail_durable(SaveFailed("left out"), for_good=True)
    for _ in range(2):
        with pytest.raises(SaveFailed, match="left out"):
            pending.wait("durable")


def test_the_training_thread_cannot_wait_for_what_it_must_do_itself():
    with pytest.raises(ConfigurationError, match="never reach"):
        SaveHandle().wait("staged")


def test_another_thread_can(tmp_path):
    pending, found = SaveHandle(), []
    thread = threading.Thread(target=lambda: found.append(pending.wait("local", 9).snapshot))
    thread.start()
    pending.reach(STAGED, "s1~1.1")
    pending.reach(COMMITTED)
    thread.join()
    assert found == ["s1~1.1"]


def test_copies_beside_training_are_settled_only_where_training_waits():
    pending, settled = SaveHandle(), []
    pending.stage("s1~1.1", lambda: settled.append(True))
    pending.wait("staged")
    for moment in ("local", "partner"):
        with pytest.raises(TimeoutError):
            pending.wait(moment, timeout_s=0)
    assert not settled, "nobody waited"
    for number, moment in enumerate(("local", "partner"), start=1):
        with pytest.raises(TimeoutError):
            pending.wait(moment, timeout_s=0.01)
        assert len(settled) == number
    pending.reach(COMMITTED)
    pending.wait("local")
    assert len(settled) == 2, "it was there"


def test_a_failure_is_raised_to_whoever_waits_for_any_moment():
    pending = SaveHandle()
    pending.deferred = "the one before hangs"
    pending.fail(SaveFailed("full"))
    assert not pending.deferred, "nobody tries it again"
    for moment in ("staged", "local", "durable"):
        with pytest.raises(SaveFailed, match="full"):
            pending.wait(moment)
    assert pending.ended


def test_a_save_that_others_keep_is_waited_for_and_one_that_they_do_not_says_why():
    pending = SaveHandle()
    pending.reach(STAGED, "s1~1.1")
    with pytest.raises(TimeoutError, match="partner after"):
        pending.wait("partner", timeout_s=0.01)
    pending.set_replicated()
    assert pending.wait("partner") is pending
    pending.set_replicated("no memory")
    with pytest.raises(SaveFailed, match=r"s1~1\.1 is not held by other hosts: no memory"):
        pending.wait("partner")
    with pytest.raises(ConfigurationError, match="never reach"):
        SaveHandle().wait("partner")


@pytest.mark.parametrize("moment", ["partners", "tomorrow", ""])
def test_an_unknown_moment_is_refused(moment):
    with pytest.raises(ConfigurationError, match="no tier of this run reaches"):
        SaveHandle().wait(moment)
