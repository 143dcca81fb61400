"""Durations as people type them."""

from __future__ import annotations

import pytest

from trainckpt.format.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("2 min", 120),
        ("1h", 3600),
        (" 1.5 h ", 5400),
        ("0.5 sec", 0.5),
        ("2d", 172800),
    ],
)
def test_a_number_and_a_unit_are_a_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "30", "s", "-1 s", "0 s", "1 m", "1e3 s", "nan s", "1 s s", "9" * 400 + " s", "٣ steps"],
)
def test_anything_else_is_none(text):
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)
