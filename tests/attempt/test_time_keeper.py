"""One attempt's time while it runs: phases without gaps, and counts that outlive the process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from trainckpt.attempt.time_keeper import (
    LAUNCHED_VARIABLE,
    MICRO_BATCHES,
    STEPS,
    TimeKeeper,
    launched_s,
    times_left,
    times_of_page,
)
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.attempt_times import TIMES, TrainedCount
from trainckpt.format.cursor import Cursor
from trainckpt.preemption.wall_time import own_start_s
from trainckpt.storage.counter_page import CounterPage, read_page
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE


def at(micro_batches):
    return Cursor(0, micro_batches // 2, 0, 0, micro_batches, 0, 0)


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path)


def test_phases_follow_each_other_without_gaps():
    keeper = TimeKeeper(time.monotonic() - 10.0)
    keeper.add_restore(2.0, {"memory": 5})
    keeper.begin_training()
    time.sleep(0.05)
    with_save = time.monotonic()
    keeper.add_wait(with_save - 0.02, with_save)
    keeper.begin_evaluation()
    time.sleep(0.02)
    keeper.end_evaluation()
    keeper.begin_leaving()
    time.sleep(0.01)
    times = keeper.times()
    assert times.trains_at == pytest.approx(10.0, abs=0.02)
    assert (times.restore_s, times.restored_bytes, times.saves) == (2.0, {"memory": 5}, 1)
    assert times.save_s == pytest.approx(0.02)
    assert times.evaluation_s >= 0.02
    assert times.seconds - times.leaves_at >= 0.01
    parts = times.training_s + times.save_s + times.evaluation_s
    assert times.trains_at + parts == pytest.approx(times.leaves_at)
    assert times.began + times.seconds == pytest.approx(time.time(), abs=0.5)


def test_waits_outside_of_training_are_no_stalls():
    keeper = TimeKeeper()
    now = time.monotonic()
    keeper.add_wait(now - 5, now)
    keeper.begin_training()
    keeper.add_wait(now - 5, time.monotonic())
    assert keeper.times().save_s < 1.0
    keeper.begin_leaving()
    before = keeper.times().save_s
    keeper.add_wait(time.monotonic() - 5, time.monotonic())
    assert keeper.times().save_s == before


@pytest.mark.parametrize("commits_first", [True, False])
def test_a_commit_marks_the_training_until_its_boundary(commits_first):
    """The saving thread may be faster than the training thread on its way out of the boundary."""
    keeper = TimeKeeper(0.0)
    keeper.begin_training()
    boundary_s = time.monotonic() + 3.0
    calls = [lambda: keeper.note_commit(at(8)), lambda: keeper.note_staged(at(8), boundary_s)]
    for call in calls if commits_first else reversed(calls):
        call()
    keeper.note_staged(at(12), boundary_s + 2.0)
    mark = keeper.times().committed
    assert mark.at == TrainedCount(8, 4)
    assert mark.training_s == pytest.approx(3.0, abs=0.1)


def test_counts_outlive_a_kill(tier):
    if (child := os.fork()) == 0:
        keeper = TimeKeeper()
        keeper.share(tier.url, 3)
        keeper.begin_training()
        keeper.numbers[STEPS], keeper.numbers[MICRO_BATCHES] = 70, 140
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    times = times_left(tier, AttemptRecord(3))
    assert times.reached == TrainedCount(140, 70)
    assert times.trains_at is not None
    assert times.leaves_at is None
    assert times_left(tier, AttemptRecord(4)) is None
    next_attempt = TimeKeeper()
    next_attempt.share(tier.url, 4)
    assert read_page(tier.url, 3) is None, "the next attempt gives it back"
    next_attempt.close()
    assert read_page(tier.url, 4) is None


def test_the_newest_of_record_and_counters_counts(tier):
    keeper = TimeKeeper()
    keeper.begin_training()
    record = AttemptRecord(3, facts={TIMES: keeper.to_json() | {"restored_bytes": {"s3": 4}}})
    keeper.share(tier.url, 3)
    keeper.numbers[MICRO_BATCHES] = 5
    times = times_left(tier, record)
    assert (times.reached.micro_batches, times.restored_bytes) == (5, {"s3": 4})
    keeper.begin_leaving()
    ended = AttemptRecord(3, facts={TIMES: keeper.to_json() | {"seconds": 99.0}})
    assert times_left(tier, ended).seconds == 99.0, "a record of the end says all"
    keeper.close()


def test_a_forked_child_counts_for_itself(tier):
    keeper = TimeKeeper()
    keeper.share(tier.url, 1)
    keeper.numbers[STEPS] = 5
    if (child := os.fork()) == 0:
        keeper.numbers[STEPS] += 1
        os._exit(int(keeper.numbers[STEPS]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert read_page(tier.url, 1)[STEPS] == 5
    keeper.close()


def test_without_shared_memory_the_process_counts_for_itself(tier, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, NONE)
    keeper = TimeKeeper()
    keeper.share(tier.url, 1)
    keeper.numbers[STEPS] = 5
    assert keeper.times().reached.steps == 5
    assert read_page(tier.url, 1) is None
    keeper.close()


def test_numbers_of_another_release_or_of_anything_tell_nothing():
    assert times_of_page(CounterPage().numbers, None) is None
    assert times_of_page([1.0], None) is None
    assert times_of_page([1.0, float("inf")] + [float("nan")] * 30, 3.0) is None


def test_restored_processes_begin_anew_where_they_were():
    keeper = TimeKeeper()
    keeper.begin_training()
    keeper.numbers[STEPS], keeper.numbers[MICRO_BATCHES] = 7, 14
    keeper.begin_anew(time.monotonic() - 1.5)
    times = keeper.times()
    assert times.begun == times.reached == TrainedCount(14, 7)
    assert times.restore_s == times.trains_at == pytest.approx(1.5, abs=0.1)
    assert times.leaves_at is None


def test_a_supervisor_states_the_launch(monkeypatch):
    stated = time.monotonic() - 3.0
    monkeypatch.setenv(LAUNCHED_VARIABLE, str(stated))
    assert launched_s() == stated
    for nonsense in ("", "-1", "nan", "1e30", "soon"):
        monkeypatch.setenv(LAUNCHED_VARIABLE, nonsense)
        assert launched_s() == pytest.approx(own_start_s(), abs=0.1)
