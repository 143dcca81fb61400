"""Parse durations as typed by users: "30s", "2 min", "1.5 h"."""

from __future__ import annotations

import re

SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MOST_S = 100 * 365 * 86400.0  # threads cannot wait for much longer
WANTED = '"30s", "2 min" or "1 h"'


def parse_duration(text: str) -> float:
    """Return seconds, more than 0 and at most a hundred years.

    Raises:
        ValueError: not a number with a unit, or out of range.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in SECONDS:
        raise ValueError(f"{text!r} is no duration")
    seconds = float(match[1]) * SECONDS[match[2]]
    if not 0 < seconds <= MOST_S:
        raise ValueError(f"{text!r} is no duration")
    return seconds
