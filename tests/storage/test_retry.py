"""Calls to a store: what is tried again, when, for how long; and when it is left alone."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.storage import connections
from trainckpt.storage.retry import CLOSED, HALF_OPEN, OPEN, Limits, RetryPolicy
from trainckpt.storage.store_errors import in_words, meaning


class Answer(OSError):
    """As s3fs raises it: an error of the system, made of a botocore error."""

    def __init__(self, status, code=""):
        super().__init__(errno.EIO, f"{status} {code}")
        self.__cause__ = cause = Exception(str(status))
        cause.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self):
        self.now_s = 0.0
        self.pauses = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


class Store:
    """Answers as it is told: an error is raised, anything else returned. The last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, tried):
        self.asked.append(tried)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def calls(clock):
    return RetryPolicy("s3://b/r", Limits(), clock=clock, sleep=clock.sleep, draw=lambda: 1.0)


TRANSIENT = [
    Answer(500, "InternalError"),
    Answer(502),
    Answer(503, "SlowDown"),
    Answer(504),
    Answer(429),
    Answer(400, "RequestTimeout"),
    Answer(409, "ConditionalRequestConflict"),
    TimeoutError("slow"),
    ConnectionResetError("gone"),
    BrokenPipeError("gone"),
]
FINAL = [
    Answer(403, "AccessDenied"),
    Answer(401),
    Answer(400, "MalformedXML"),
    Answer(501),
    Answer(507, "Full"),
    Answer(413, "EntityTooLarge"),
    Answer(404, "NoSuchBucket"),
    Answer(412, "PreconditionFailed"),
    PermissionError("no"),
    ValueError("?"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_what_may_go_better_is_tried_again(calls, clock, error):
    store = Store(error, error, "done")
    assert calls.make("write k", store) == "done"
    assert store.asked == [0, 1, 2]
    assert clock.pauses == [0.2, 0.4]


@pytest.mark.parametrize("error", FINAL, ids=str)
def test_what_will_not_go_better_is_not_tried_again(calls, error):
    store = Store(error)
    with pytest.raises(TierUnavailable, match="cannot write k"):
        calls.make("write k", store)
    assert store.asked == [0]
    assert calls.breaker.health().state == CLOSED  # it has answered


def test_what_is_absent_is_no_fault_of_the_store(calls):
    for error in (Answer(404, "NoSuchKey"), FileNotFoundError("k")):
        with pytest.raises(UnusableSnapshot, match="missing"):
            calls.make("read k", Store(error))


def test_the_hint_says_what_to_do(calls):
    for error, hint in (
        (Answer(403), "credentials"),
        (Answer(507), "free space"),
        (Answer(404, "NoSuchBucket"), "make the bucket"),
    ):
        with pytest.raises(TierUnavailable) as caught:
            calls.make("write k", Store(error))
        assert hint in caught.value.hint


def test_a_library_that_finds_no_credentials_says_so(calls):
    NoCredentialsError = type("NoCredentialsError", (Exception,), {})  # noqa: N806 - as botocore's
    with pytest.raises(TierUnavailable) as caught:
        calls.make("look", Store(NoCredentialsError("Unable to locate credentials")))
    assert "credentials in the environment" in caught.value.hint


def test_pauses_double_up_to_a_bound_and_are_drawn_below_it(clock):
    draws = iter([0.5, 0.0, 1.0] + [1.0] * 20)
    calls = RetryPolicy("s3://b/r", clock=clock, sleep=clock.sleep, draw=lambda: next(draws))
    calls.make("look", Store("answer"))
    with pytest.raises(TierUnavailable, match="tried"):
        calls.make("write k", Store(Answer(503)))
    assert clock.pauses[:8] == [0.1, 0.0, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert 110 < clock.now_s <= 120


def test_a_store_that_never_answered_is_given_up_sooner(calls, clock):
    with pytest.raises(TierUnavailable):
        calls.make("look", Store(ConnectionRefusedError("nobody")))
    assert clock.now_s <= 20


def test_a_dead_store_is_left_alone_and_one_call_looks_whether_it_is_back(calls, clock):
    dead = Store(ConnectionRefusedError("nobody there"))
    for _ in range(2):
        assert calls.breaker.health().state == CLOSED
        with pytest.raises(TierUnavailable, match="tried"):
            calls.make("write k", dead)
    health, asked = calls.breaker.health(), len(dead.asked)
    assert (health.state, health.for_s, health.num_given_up) == (OPEN, 0.0, 2)
    assert "nobody there" in health.last_error
    with pytest.raises(TierUnavailable, match="no request is sent") as caught:
        calls.make("write k", dead)
    assert "nobody there" in str(caught.value)
    assert len(dead.asked) == asked
    clock.now_s += 5.0
    with pytest.raises(TierUnavailable, match="tried 1 times"):  # the trial, once
        calls.make("write k", dead)
    assert calls.breaker.health().state == OPEN
    clock.now_s += 9.9  # twice as long by now
    with pytest.raises(TierUnavailable, match="no request is sent"):
        calls.make("write k", Store("back"))
    clock.now_s += 0.1

    def trial(_):
        assert calls.breaker.health().state == HALF_OPEN
        with pytest.raises(TierUnavailable, match="no request is sent"):
            calls.make("another", Store("x"))
        return "back"

    assert calls.make("write k", trial) == "back"
    assert calls.breaker.health().state == CLOSED
    assert calls.make("write k", Store(Answer(503), "again")) == "again"


def test_a_refusal_ends_a_trial_too_for_it_is_an_answer(calls, clock):
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            calls.make("write k", Store(Answer(503)))
    clock.now_s += 5.0
    with pytest.raises(TierUnavailable):
        calls.make("write k", Store(Answer(403)))
    assert calls.breaker.health().state == CLOSED


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_try_that_is_cut_off_for_a_process_dump_is_no_failure_of_the_store(
    calls, clock, is_trial
):
    if is_trial:
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                calls.make("write", Store(Answer(503)))
        clock.now_s += 100.0
        assert calls.breaker.health().state == OPEN
    before, waits = calls.breaker.health().num_given_up, len(clock.pauses)
    holding = threading.Thread(target=connections.hold_requests)

    def call(tried):
        if tried == 0:
            holding.start()
            while not connections.are_held():
                time.sleep(0.001)
            threading.Timer(0.1, connections.release_requests).start()
            clock.now_s += 3600.0  # a dump, and its restore an hour later
            raise ConnectionResetError
        assert not connections.are_held()
        assert calls.breaker.health().num_given_up == before
        return tried

    assert calls.make("write", call) == 1
    holding.join()
    assert calls.breaker.health().state == CLOSED
    assert len(clock.pauses) == waits


def test_no_secret_is_shown():
    error = OSError("cannot reach https://me:secret@host/b?X-Amz-Signature=abc or s3://k:p@b/r")
    assert in_words(error) == "OSError: cannot reach https://host/b or s3://b/r"
    assert meaning(error) == "refused"
