"""What a heartbeat says of a live attempt: read as written, whatever else may stand there."""

from __future__ import annotations

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from tests.format.test_attempt_times import anything
from trainckpt.attempt.live_status import (
    LONGEST,
    MOST_ITEMS,
    LiveStatus,
    NextSave,
    SavingNow,
    StopNow,
    UploadNow,
    parse_live_status,
)
from trainckpt.format.save_history import NotKept

WHOLE = LiveStatus(
    written=1795232795.5,
    phase="training",
    micro_batch_s=0.25,
    window=4,
    saving=SavingNow(snapshot="s8~1.2", num_bytes=10, file_bytes=5, seconds=1.5, predicted_s=2.0),
    stop=StopNow(reason="SIGTERM", seconds_left=21.0),
    next_saves=(NextSave(at_step=20), NextSave(in_s=3.5, in_memory=True)),
    skipped=1,
    failed=2,
    not_saved=(NotKept(snapshot="s4~1.1", how="failed", reason="disk full", when=5.0),),
    uploads=(UploadNow(tier="s3", snapshot="s8~1.2", num_bytes=10, copied_bytes=4, waiting=1),),
    in_memory="s8~1.2",
    replicates=True,
)


def test_a_status_is_read_as_it_was_written():
    assert parse_live_status(json.loads(json.dumps(WHOLE.to_json()))) == WHOLE
    assert WHOLE.step_s == 1.0
    assert LiveStatus().step_s is None


def test_a_heartbeat_of_an_older_release_has_no_status():
    assert parse_live_status({"beat": 3}) is None
    assert parse_live_status(7) is None


@given(st.dictionaries(st.sampled_from([*WHOLE.to_json(), "else"]), anything))
def test_whatever_a_heartbeat_holds_every_field_is_of_its_type(changed):
    body = {**WHOLE.to_json(), **changed, "written": 1.0}
    status = parse_live_status(json.loads(json.dumps(body)))
    assert json.loads(json.dumps(status.to_json())) == json.loads(
        json.dumps(parse_live_status(json.loads(json.dumps(status.to_json()))).to_json())
    )
    assert {field.name for field in fields(status)} == set(WHOLE.to_json())
    assert status.skipped >= 0


def test_what_is_too_much_is_cut():
    body = {**WHOLE.to_json(), "not_saved": [{"reason": "x" * 9999}] * 999}
    status = parse_live_status(body)
    assert len(status.not_saved) == MOST_ITEMS
    assert len(status.not_saved[0].reason) == LONGEST
