"""Which exceptions are a signal handler's."""

from __future__ import annotations

import functools
import signal

import pytest

from trainckpt.preemption.signal_source import raised_by_handler


def late(signum, frame):
    raise TimeoutError("late")


def late_with(word, signum, frame):
    raise TimeoutError(word)


class Late:
    def __call__(self, signum, frame):
        raise TimeoutError("late")

    def method(self, signum, frame):
        raise TimeoutError("late")


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGALRM)
    yield lambda function: signal.signal(signal.SIGALRM, function)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["function", "partial", "method", "object"])
def test_what_a_handler_raised_is_found_whatever_kind_it_is(handler, kind):
    kinds = {
        "function": late,
        "partial": functools.partial(late_with, "late"),
        "method": Late().method,
        "object": Late(),
    }
    handler(kinds[kind])
    with pytest.raises(TimeoutError) as raised:
        signal.raise_signal(signal.SIGALRM)
    assert raised_by_handler(raised.value) is raised.value


def wrap():
    try:
        signal.raise_signal(signal.SIGALRM)
    except TimeoutError as error:
        raise RuntimeError("wrapped") from error


def test_what_was_raised_from_it_leads_to_it(handler):
    handler(late)
    with pytest.raises(RuntimeError) as raised:
        wrap()
    assert isinstance(raised_by_handler(raised.value), TimeoutError)


def test_an_error_of_the_same_type_that_no_handler_raised_is_none_of_them(handler):
    handler(late)
    with pytest.raises(TimeoutError) as raised:
        late_with("of a call", 0, None)
    assert raised_by_handler(raised.value) is None
