"""Strict reading of JSON: one kind of error, whatever the bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_was_spelled_is_read(value):
    assert json_io.parse(json_io.canonical(value), "x", max_bytes=1 << 20) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        json_io.parse(data, "x", max_bytes=1000)
    except UnusableSnapshot:
        pass


@pytest.mark.parametrize(
    "data", [b'{"a": 1, "a": 2}', b"NaN", b"[Infinity]", b"", b"\xff", b"[" * 10**6, b"1" * 10_000]
)
def test_what_json_leaves_open_is_refused(data):
    with pytest.raises(UnusableSnapshot):
        json_io.parse(data, "x", max_bytes=1 << 24)


def test_too_many_bytes_are_not_parsed():
    with pytest.raises(UnusableSnapshot, match="more than 3"):
        json_io.parse(b"1234", "x", max_bytes=3)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 2**63])
def test_a_count_is_an_integer_in_range(value):
    with pytest.raises(UnusableSnapshot):
        json_io.count({"n": value}, "n", "x")


def test_a_digest_is_of_the_text_or_of_its_canonical_spelling():
    data = json_io.with_digest({"a": [1, 2], "z": {"digest": "mine"}})
    body = json.loads(data)
    assert json_io.verify_digest(body, "x", data) == {"a": [1, 2], "z": {"digest": "mine"}}
    spaced = json.dumps(body, indent=1).encode()
    assert json_io.verify_digest(body, "x", spaced) == json_io.verify_digest(body, "x")
    other = data.replace(b"[1,2]", b"[1,3]")
    with pytest.raises(UnusableSnapshot, match="its own digest"):
        json_io.verify_digest(json.loads(other), "x", other)
