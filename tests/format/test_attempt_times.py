"""The times in an attempt's record: written and read, and whatever else may stand there."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainckpt.format.attempt_times import AttemptTimes, CommitMark, TrainedCount

WHOLE = AttemptTimes(
    began=1795232795.5,
    seconds=12.25,
    trains_at=2.5,
    leaves_at=11.0,
    restore_s=0.75,
    restored_bytes={"memory": 10, "s3": 20},
    save_s=0.5,
    saves=3,
    evaluation_s=1.0,
    begun=TrainedCount(20, 10),
    reached=TrainedCount(50, 25),
    committed=CommitMark(TrainedCount(40, 20), 4.0),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)  # JSON has it, and no float can hold it
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def test_times_are_read_as_they_were_written():
    assert AttemptTimes.parse(json.loads(json.dumps(WHOLE.to_json()))) == WHOLE
    assert WHOLE.training_s == 11.0 - 2.5 - 0.5 - 1.0


def test_an_attempt_that_was_killed_lacks_its_later_phases():
    body = {**WHOLE.to_json(), "leaves_at": None, "committed": None}
    times = AttemptTimes.parse(body)
    assert (times.leaves_at, times.committed) == (None, None)
    assert times.training_s == 12.25 - 2.5 - 0.5 - 1.0


def test_without_a_duration_there_are_no_times():
    for missing in ("began", "seconds"):
        body = {**WHOLE.to_json(), missing: "long"}
        assert AttemptTimes.parse(body) is None
    assert AttemptTimes.parse(None) is None


@given(st.dictionaries(st.sampled_from([*WHOLE.to_json(), "else"]), anything))
def test_whatever_a_record_holds_the_phases_fit_into_the_duration(changed):
    times = AttemptTimes.parse({**WHOLE.to_json(), **changed})
    if times is None:
        return
    trains_at = times.seconds if times.trains_at is None else times.trains_at
    leaves_at = times.seconds if times.leaves_at is None else times.leaves_at
    assert 0 <= times.restore_s <= max(trains_at, 0)
    assert 0 <= trains_at <= times.seconds or times.leaves_at is not None
    assert leaves_at <= times.seconds
    assert times.save_s + times.evaluation_s + times.training_s <= times.seconds + 1e-6
    assert times.reached.steps >= times.begun.steps
