"""Buckets of a run, from records that a test writes: they add up, and nothing counts twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.attempt import heartbeat
from trainckpt.attempt.goodput import (
    BEFORE,
    BUCKETS,
    GAP,
    LEAVING,
    OTHER,
    PREPARATION,
    REPEATS,
    RESTORE,
    SAVE,
    TRAINING,
    WASTED,
    account,
    before_fact,
    name_in_ml_goodput,
    repeats_fact,
)
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.format.attempt_times import TIMES, AttemptTimes, CommitMark, TrainedCount
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

T0 = 1_795_000_000.0


def times(began, seconds, begun=0, reached=0, **more):
    """Training from second 2 to the last but one, two micro-batches a step."""
    values = {"trains_at": 2.0, "leaves_at": seconds - 1.0, **more}
    return AttemptTimes(
        began=T0 + began,
        seconds=seconds,
        begun=TrainedCount(2 * begun, begun),
        reached=TrainedCount(2 * reached, reached),
        **values,
    )


def record(number, parent, own, **facts):
    outcome = {"outcome": "stopped"}
    facts = {"started": own.began + 1.0, TIMES: own.to_json(), **facts}
    return AttemptRecord(number, parent, "ended", outcome, facts=facts)


def buckets(one):
    return {name: seconds for name, seconds in one.buckets.items() if seconds}


def test_a_stopped_and_resumed_run_wastes_nothing():
    first = times(0, 10, 0, 7, save_s=0.5, restore_s=0.0)
    second = times(15, 20, 7, 20, restore_s=1.5, restored_bytes={"memory": 1, "s3": 2})
    run = account({1: record(1, None, first), 2: record(2, "s7~1.1", second)})
    assert buckets(run.attempts[0]) == {PREPARATION: 2, TRAINING: 6.5, SAVE: 0.5, LEAVING: 1}
    assert buckets(run.attempts[1]) == {
        GAP: 5,
        PREPARATION: 0.5,
        RESTORE: 1.5,
        TRAINING: 17,
        LEAVING: 1,
    }
    assert run.restore_s == {"memory": 0.5, "s3": 1.0}
    assert run.wall_s == 35
    assert run.repeated == TrainedCount()
    assert run.goodput == pytest.approx(23.5 / 35)


def test_training_after_the_snapshot_of_a_later_attempt_is_wasted():
    mark = CommitMark(TrainedCount(10, 5), 4.0)
    killed = times(0, 11, 0, 9, leaves_at=None, committed=mark)
    run = account({1: record(1, None, killed), 2: record(2, "s5~1.1", times(20, 5, 5, 8))})
    assert run.attempts[0].repeated == TrainedCount(8, 4)
    assert run.attempts[0].buckets[WASTED] == 9 - 4
    older = account({1: record(1, None, killed), 2: record(2, "s3~1.0", times(20, 5, 3, 8))})
    assert older.attempts[0].buckets[WASTED] == pytest.approx(9 * 12 / 18), "by its share"


def test_what_was_killed_last_is_not_known_to_be_wasted():
    run = account({1: record(1, None, times(0, 11, 0, 9, leaves_at=None))})
    assert run.buckets[WASTED] == 0


def test_an_attempt_between_two_that_saved_nothing_is_wasted_whole():
    records = {
        1: record(1, None, times(0, 10, 0, 7)),
        2: record(2, "s7~1.1", times(10, 10, 7, 9, leaves_at=None)),
        3: record(3, "s7~1.1", times(30, 10, 7, 20)),
    }
    run = account(records)
    assert run.attempts[1].buckets[TRAINING] == 0
    assert run.attempts[1].buckets[WASTED] == 8
    assert run.repeated.steps == 2


def test_a_resume_from_an_older_snapshot_gives_up_two_attempts():
    records = {
        1: record(1, None, times(0, 10, 0, 7)),
        2: record(2, "s7~1.2", times(10, 10, 7, 12)),
        3: record(3, "s4~1.1", times(30, 10, 4, 20)),
    }
    assert account(records).repeated.steps == 3 + 5
    again = {**records, 4: record(4, "s12~2.1", times(50, 10, 12, 13))}
    run = account(again)
    assert [each.repeated.steps for each in run.attempts] == [0, 0, 16, 0], "it was taken up again"


def test_an_attempt_that_has_not_chosen_gives_nothing_up():
    records = {
        1: record(1, None, times(0, 10, 0, 7)),
        2: record(2, UNDECIDED, times(20, 1, trains_at=None, leaves_at=None)),
    }
    run = account(records)
    assert run.repeated.steps == 0
    assert buckets(run.attempts[1]) == {GAP: 10, PREPARATION: 1}


def test_an_older_attempt_that_goes_on_counts_until_the_newer_was_claimed():
    records = {
        1: record(1, None, times(0, 50, 0, 7)),
        2: record(2, "s5~1.1", times(30, 10, 5, 9)),
    }
    run = account(records)
    assert run.attempts[0].ended == run.attempts[1].began == T0 + 31
    assert sum(run.buckets.values()) == run.wall_s == 40


def test_records_of_older_releases_tell_the_duration_alone():
    old = AttemptRecord(1, None, "ended", {"seconds": 8.0}, facts={"started": T0})
    bare = AttemptRecord(2, "s4~1.1", facts={"started": T0 + 9})
    run = account({1: old, 2: bare, 3: record(3, "s4~1.1", times(20, 10, 4, 9))})
    assert buckets(run.attempts[0]) == {OTHER: 8}
    assert run.repeated.steps == 0
    assert sum(run.buckets.values()) == run.wall_s


def test_a_run_without_attempts_has_no_time():
    run = account({})
    assert (run.wall_s, run.goodput, run.to_json()["goodput"]) == (0, None, None)


moments = st.floats(0, 1000)
counts = st.integers(0, 50)


@st.composite
def histories(draw):
    """Records with any times and parents: overlapping, damaged, without an end."""
    records = {}
    for number in range(1, draw(st.integers(1, 5)) + 1):
        own = AttemptTimes(
            began=T0 + draw(moments),
            seconds=draw(moments),
            trains_at=draw(st.none() | moments),
            leaves_at=draw(st.none() | moments),
            restore_s=draw(moments),
            save_s=draw(moments),
            evaluation_s=draw(moments),
            begun=TrainedCount(draw(counts), draw(counts)),
            reached=TrainedCount(draw(counts), draw(counts)),
            committed=draw(st.none() | st.builds(CommitMark, st.just(TrainedCount()), moments)),
        )
        older = draw(st.integers(1, number))
        parent = draw(st.sampled_from([None, UNDECIDED, "x", f"s1~{older}.1"]))
        records[number] = record(number, parent, own, started=T0 + draw(moments))
    return records


@given(histories())
def test_whatever_the_records_hold_the_buckets_add_up_to_the_wall_time(records):
    run = account(records)
    assert sum(run.buckets.values()) == pytest.approx(run.wall_s, abs=1e-4)
    assert all(seconds >= -1e-6 for each in run.attempts for seconds in each.buckets.values())
    assert run.repeated.steps >= 0
    assert run.repeated.micro_batches >= 0


def test_the_next_attempt_records_what_is_left_of_one_that_was_killed(tmp_path):
    tier = LocalTier(tmp_path)
    killed = record(1, None, times(0, 9, 0, 7, leaves_at=None)).with_(outcome=None)
    attempt_history.replace(tier, killed)
    left = {TIMES: times(0, 11, 0, 9, leaves_at=None).to_json()}
    heartbeat.path_of(tier, 1).write_text(json.dumps({"beat": 3, **left}))
    fact = before_fact(tier, {1: killed})
    assert fact == {BEFORE: {"attempt": 1, **left}}
    own = record(2, "s5~1.1", times(20, 5, 5, 8))
    known = account({1: killed, 2: own.with_(facts={**own.facts, **fact})})
    assert known.attempts[0].repeated.steps == 4
    assert before_fact(tier, {1: record(1, None, times(0, 11))}) == {}, "it recorded its end"
    assert before_fact(tier, {}) == {}


def test_an_attempt_records_what_it_repeats_of_all_before_it():
    first, second = record(1, None, times(0, 10, 0, 7)), record(2, "s7~1.2", times(10, 10, 7, 12))
    third = record(3, "s4~1.1", times(30, 1, 0, 0, trains_at=None, leaves_at=None))
    repeats = repeats_fact({1: first, 2: second}, third, TrainedCount(8, 4))[REPEATS]
    assert (repeats["steps"], repeats["micro_batches"]) == (3 + 5, 6 + 10)
    assert repeats["seconds"] == pytest.approx(7 * 3 / 7 + 7)
    stopped = third.with_(parent="s12~2.1")
    assert repeats_fact({1: first, 2: second}, stopped, TrainedCount(24, 12)) == {}


def test_buckets_have_the_names_of_ml_goodput():
    """`BadputType` of ml-goodput-measurement, and `GoodputType.TOTAL`."""
    assert {name_in_ml_goodput(bucket) for bucket in BUCKETS} == {
        "TOTAL",
        "TRAINING_PREP",
        "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
        "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
        "WASTED_PROGRESS_FROM_DISRUPTION",
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
        "CUSTOM_BADPUT_EVENTS.EVALUATION",
        "CUSTOM_BADPUT_EVENTS.LEAVING",
        "OTHER",
    }
