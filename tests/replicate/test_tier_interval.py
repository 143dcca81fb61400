"""How often a slower tier gets a copy: what is due by steps, by time and as measured, and a run."""

from __future__ import annotations

import math
import time

import pytest

from tests.end_to_end.training import attempt, usable
from trainckpt.attempt.options import Every, read_options
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.errors import ConfigurationError
from trainckpt.format.names import SnapshotName
from trainckpt.replicate.tier_uploader import UploadQueue
from trainckpt.replicate.uploads import LastCopy, copy_interval_s, wait_s

BEGUN = LastCopy(7, 100.0)


@pytest.mark.parametrize(
    ("every", "step", "last", "now_s", "expected"),
    [
        (None, 8, BEGUN, 100, 0),  # no interval of its own: whatever there is
        (Every(steps=5), 9, BEGUN, 200, math.inf),
        (Every(steps=5), 10, BEGUN, 100, 0),
        (Every(steps=5), 12, BEGUN, 100, 0),  # beyond the multiple: 10 was not saved, or has failed
        (Every(steps=5), 14, LastCopy(12, 0.0), 10**6, math.inf),
        (Every(steps=5), 15, LastCopy(12, 0.0), 0, 0),
        (Every(seconds=60), 8, BEGUN, 130, 30),
        (Every(seconds=60), 8, BEGUN, 161, 0),
        (Every(auto=True), 8, BEGUN, 100, 0),  # nothing was measured yet
        (Every(auto=True), 8, LastCopy(7, 100.0, 30.0), 140, 20),  # half of the time at the most
        (Every(auto=True), 8, LastCopy(7, 100.0, 30.0), 161, 0),
        (Every(), 10**9, BEGUN, 10**9, math.inf),
    ],
)
def test_how_long_the_newest_snapshot_has_to_wait(every, step, last, now_s, expected):
    assert wait_s(every, step, last, now_s) == expected


@pytest.mark.parametrize(
    ("every", "last", "own_s", "step_s", "expected"),
    [
        (None, BEGUN, 60, 2, 60),  # every snapshot
        (Every(steps=5), BEGUN, 60, 2, 60),  # no copy without a snapshot
        (Every(steps=100), BEGUN, 60, 2, 200),
        (Every(steps=100), BEGUN, 60, None, None),
        (Every(seconds=600), BEGUN, 60, 2, 600),
        (Every(auto=True), BEGUN, 60, 2, 60),  # nothing was measured yet
        (Every(auto=True), LastCopy(7, 100.0, 300.0), 60, 2, 600),  # half of the time at the most
        (Every(auto=True), LastCopy(7, 100.0, 3.0), 60, 2, 60),
        (Every(), BEGUN, 60, 2, None),
        (Every(seconds=600), BEGUN, None, 2, None),
    ],
)
def test_how_long_it_is_from_one_copy_to_the_next(every, last, own_s, step_s, expected):
    assert copy_interval_s(every, last, own_s, step_s) == expected


def queue_of(every, *names, asked=(), tagged=()):
    queue = UploadQueue(every, 0, 0.0)
    for text in names:
        handle = SaveHandle(is_requested=text in asked)
        queue.add(SnapshotName.parse(text), handle, tagged=text in tagged)
    return queue


def test_what_was_asked_for_or_has_a_tag_goes_whatever_the_interval_and_the_rest_is_left_out():
    names = ("s1~1.1", "s2~1.2", "s3~1.3", "s4~1.4")
    for how in ({"asked": ["s2~1.2"]}, {"tagged": ["s2~1.2"]}):
        queue = queue_of(Every(steps=10), *names, **how)
        assert queue.next(0.0) == (SnapshotName.parse("s2~1.2"), 0.0)
        for name in queue.superseded_by(SnapshotName.parse("s2~1.2")):
            queue.remove(name)
        assert queue.next(0.0) == (SnapshotName.parse("s4~1.4"), math.inf)
        assert queue.next(0.0, all_at_once=True) == (SnapshotName.parse("s4~1.4"), 0.0)
        assert len(queue) == 1
    always = queue_of(None, *names)
    assert always.next(0.0) == (SnapshotName.parse("s4~1.4"), 0.0)
    assert len(always) == 4
    left = queue_of(Every())
    left.add_earlier(SnapshotName.parse("s9~1.4"), tagged=False)
    assert left.next(0.0) == (SnapshotName.parse("s9~1.4"), 0.0)
    assert not queue_of(Every())


@pytest.mark.parametrize(
    ("value", "in_full"),
    [
        ("10 steps, s3: 100 steps", "10 steps, s3: 100 steps"),
        ("s3: 1 h", "10 min, s3: 1 h"),
        ({"local": "10 steps", "s3://bucket/run": "auto"}, "10 steps, s3://bucket/run: auto"),
        ("10 steps,far:never", "10 steps, far: never"),
        ("never, s3://bucket/run: 2 h", "never, s3://bucket/run: 2 h"),
    ],
)
def test_intervals_of_tiers_are_read_and_told_as_they_may_be_typed(value, in_full):
    every = read_options({"every": value}, {}).every
    assert every.in_full == in_full
    assert read_options({"every": in_full}, {}).every == every
    assert every.text == in_full.partition(",")[0]  # the reason that manifests give


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", "10 steps, 20 steps"),
        ("every", "10 steps, s3: often"),
        ("every", "s3:"),
        ("every", "s3: 1 h, s3: 2 h"),
        ("every", "1 h, : 2 h"),
        ("every", {"s3": 3}),
        ("memory_every", "1 step, s3: 2 steps"),
    ],
)
def test_intervals_that_cannot_be_read_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=r"\(argument\) is not an option"):
        read_options({name: value}, {})


def test_a_tier_gets_a_copy_at_its_own_interval_what_was_asked_for_and_the_last(tmp_path):
    with pytest.raises(ConfigurationError, match="this run has no tier 's3'") as no:
        attempt(tmp_path / "run", tiers=[tmp_path / "far"], every="1 steps, s3: 3 steps")
    assert no.value.hint.startswith("use one of local, far,")
    assert not (tmp_path / "run/attempts").exists()
    asked = []

    def wait_for(step, tier):
        until = time.monotonic() + 60
        while not any(name.startswith(f"s{step}~") for name in usable(tmp_path / tier)):
            assert time.monotonic() < until
            time.sleep(0.01)

    def inside(ckpt, _):
        at = ckpt.cursor
        if at.step and at.micro == 0:
            wait_for(at.step, "run")  # the next save is skipped while one is still being written
        if (at.step, at.micro) in ((3, 1), (6, 1)):
            wait_for(at.step, "far")
        if (at.step, at.micro) == (4, 0):
            asked.append(ckpt.save())
        if (at.step, at.micro) == (5, 0):
            asked.append(asked.pop().wait("durable").snapshot)

    attempt(
        tmp_path / "run",
        epochs=3,
        tiers=[tmp_path / "far", tmp_path / "near"],
        durable="far",
        every="1 steps, far: 3 steps",
        keep_last=50,
        inside=inside,
    )
    here, far = usable(tmp_path / "run"), usable(tmp_path / "far")
    assert far == [n for n in here if n.startswith(("s3~", "s6~")) or n in asked or n == here[-1]]
    assert len(here) > len(far) >= 4
    assert usable(tmp_path / "near")[-1] == here[-1]
