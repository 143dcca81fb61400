"""The history of an attempt's saves: read as written, whatever stands there, and short."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from tests.format.test_attempt_times import anything
from trainckpt.format.save_history import (
    MOST_ROWS,
    NotKept,
    SaveHistory,
    SaveRow,
    dump_history,
    merge,
    parse_history,
    thin,
)

T = 1_795_000_000.0
WHOLE = SaveHistory(
    rows=(
        SaveRow(snapshot="s10~1.1", at=T, stall_s=0.25, local_s=1.5, num_bytes=700),
        SaveRow(
            snapshot="s20m1~1.2",
            at=T + 9,
            count=2,
            stall_s=0.125,
            memory_s=0.5,
            local_s=2.0,
            copies={"s3": 4.5, "partner": 0.75},
            num_bytes=100,
            reached_bytes=600,
        ),
    ),
    not_kept=(
        NotKept(snapshot="s15~1.2", how="skipped", reason="too soon", when=T + 4),
        NotKept(snapshot="s20m1~1.2", how="not copied", reason="down", when=T + 5, tier="s3"),
    ),
    committed=3,
    in_memory=40,
    skipped=1,
    failed=0,
    not_copied=2,
    num_bytes=900,
)


def row(number, **facts):
    return SaveRow(snapshot=f"s{number}~1.{number}", at=T + number, **facts)


def test_a_history_is_read_as_it_was_written():
    assert parse_history(json.loads(json.dumps(dump_history(WHOLE)))) == WHOLE
    assert parse_history(dump_history(SaveHistory())) == SaveHistory()
    assert parse_history([]) is None


def test_a_row_of_several_saves_has_the_slowest_of_each_stage_and_the_newest_name():
    one = row(1, stall_s=3.0, local_s=4.0, num_bytes=5, copies={"a": 1.0, "b": 9.0})
    other = row(2, memory_s=1.0, local_s=2.0, reached_bytes=6, copies={"b": 2.0})
    assert merge(one, other) == row(
        2,
        count=2,
        stall_s=3.0,
        memory_s=1.0,
        local_s=4.0,
        num_bytes=5,
        reached_bytes=6,
        copies={"a": 1.0, "b": 9.0},
    )


def test_a_long_history_is_short_counts_every_save_and_keeps_the_slowest():
    rows = []
    for number in range(5000):
        rows.append(row(number, stall_s=9.0 if number == 1234 else 0.5))
        thin(rows)
    assert len(rows) == MOST_ROWS
    assert sum(each.count for each in rows) == 5000
    assert max(each.stall_s for each in rows) == 9.0
    assert [each.at for each in rows] == sorted(each.at for each in rows)
    assert max(each.count for each in rows) <= 4 * 5000 / MOST_ROWS, "no long stretch has one row"
    history = SaveHistory(rows=tuple(rows), committed=5000)
    assert len(json.dumps(dump_history(history))) < 12_000


def test_the_rows_of_a_thousand_attempts_are_thinned_evenly_and_lose_no_save():
    rows = [row(number, count=1 + number % 3, local_s=float(number)) for number in range(100_000)]
    saves = sum(each.count for each in rows)
    thin(rows, 120)
    assert 60 < len(rows) <= 120
    assert sum(each.count for each in rows) == saves
    assert max(each.local_s for each in rows) == 99_999.0
    assert max(each.count for each in rows) <= 2.1 * saves / 120, "no long stretch has one row"


@given(
    st.dictionaries(st.sampled_from([*dump_history(WHOLE), "else"]), anything),
    st.dictionaries(st.sampled_from([*dump_history(WHOLE)["rows"], "else"]), anything),
)
def test_whatever_a_record_holds_the_history_is_of_its_types(changed, columns):
    body = {**dump_history(WHOLE), **changed}
    if isinstance(body["rows"], dict):
        body["rows"] = {**body["rows"], **columns}
    history = parse_history(json.loads(json.dumps(body)))
    assert parse_history(json.loads(json.dumps(dump_history(history)))) is not None
    for each in history.rows:
        assert each.count >= 1
        assert each.num_bytes >= 0
        assert all(seconds >= 0 for seconds in each.copies.values())
    assert {field.name for field in fields(history)} == set(dump_history(WHOLE))


def test_columns_of_another_length_are_left_out():
    body = dump_history(WHOLE)
    body["rows"]["stall_s"] = [1.0]
    found = parse_history(body)
    assert found == replace(WHOLE, rows=tuple(replace(each, stall_s=None) for each in WHOLE.rows))
