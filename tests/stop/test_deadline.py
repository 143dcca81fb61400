"""The deadline inside the process, and the pace that predictions rest on."""

from __future__ import annotations

import threading

import pytest

from trainckpt.format.cursor import Cursor
from trainckpt.save.estimates import Timings
from trainckpt.stop.deadline import Deadline, granted_s, margin_s
from trainckpt.stop.early_signals import early_limit_s

FAR_S = 3600.0


def test_the_earliest_deadline_stands_and_ends_the_process_before_it_comes():
    missed = threading.Event()
    deadline = Deadline(missed.set)
    deadline.tighten(None)
    assert deadline.left_s() is None
    deadline.tighten(FAR_S)
    deadline.tighten(0.3)
    deadline.tighten(FAR_S)
    assert missed.wait(10)
    assert deadline.left_s() <= 0


def test_a_deadline_that_was_met_ends_nothing():
    missed = threading.Event()
    deadline = Deadline(missed.set)
    deadline.tighten(0.6)
    deadline.end()
    assert not missed.wait(0.7)


@pytest.mark.parametrize(("left_s", "margin"), [(1.0, 0.25), (10.0, 1.0), (600.0, 2.0)])
def test_the_margin_is_a_tenth_within_bounds(left_s, margin):
    assert margin_s(left_s) == margin


@pytest.mark.parametrize(
    ("environment", "granted"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "x"}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, 90.0),
        ({"TORCHELASTIC_RUN_ID": "x", "TRAINCKPT_SUPERVISOR": "/tmp/y"}, None),
    ],
)
def test_torchrun_alone_grants_what_its_shutdown_timeout_says(environment, granted):
    assert granted_s(environment) == granted


def test_the_pace_is_the_median_without_what_is_done_at_boundaries():
    timings = Timings()
    assert timings.micro_batch_s is None
    for begun in (0.0, 10.0, 20.0, 30.0):
        timings.on_boundary(begun + 1.0)
        timings.after_save(Cursor(), begun + 10.0)  # a save of 9 s
    assert timings.micro_batch_s == 1.0


def test_a_deadline_that_was_met_is_over_for_later_ones_too():
    """A decision may still be on its way on the watcher's thread."""
    missed = threading.Event()
    deadline = Deadline(missed.set)
    deadline.end()
    deadline.tighten(0.0)
    assert not missed.wait(0.3)


def test_the_slowest_and_the_fastest_of_the_last_saves_are_known():
    timings = Timings()
    assert (timings.seconds_per_byte, timings.least_seconds_per_byte) == (None, None)
    timings.record_save(100, 1.0)
    timings.record_save(100, 3.0)
    timings.record_save(0, 9.0)
    assert (timings.least_seconds_per_byte, timings.seconds_per_byte) == (0.01, 0.03)


@pytest.mark.parametrize(("grace_s", "limit_s"), [(None, 30.0), (10.0, 5.0), (600.0, 30.0)])
def test_a_run_that_does_not_begin_after_a_notice_is_left_in_time(grace_s, limit_s):
    assert early_limit_s(grace_s) == limit_s
