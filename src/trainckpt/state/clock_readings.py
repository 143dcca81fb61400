"""Recognise readings of clocks: they are others in each process, so they are never compared.

`is_wall_time` is for values that a resume would restore: a float in its range is hardly anything
else. `is_reading` is for values that are only compared. It also takes the monotonic clocks, whose
readings may look like other numbers on a host that has just booted.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

_WALL_S = (1.4e9, 4.1e9)  # seconds since 1970: from 2014 to 2099


def is_wall_time(value: Any) -> bool:
    """Return True for a float of seconds since 1970."""
    return isinstance(value, float) and _WALL_S[0] < value < _WALL_S[1]  # `best = 9e9` is none


def is_reading(value: Any) -> bool:
    """Return True for a reading of any clock in this process, in seconds or nanoseconds."""
    if type(value) is int and value > _WALL_S[0]:
        value = value / 1e9
    elif type(value) is not float:
        return False
    monotonic_s, performance_s, started_s = time.monotonic(), time.perf_counter(), _started_s()
    return (
        is_wall_time(value)
        or started_s <= value <= monotonic_s
        or performance_s - (monotonic_s - started_s) <= value <= performance_s
    )


@cache
def _started_s() -> float:
    """Return when this process started by the monotonic clock; a second earlier, to be safe."""
    import psutil

    age_s: float = time.time() - psutil.Process().create_time()
    return time.monotonic() - age_s - 1
