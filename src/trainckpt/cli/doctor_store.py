"""doctor, for a run in an object store: whether it answers, how it creates, how fast it is.

What is written for that is removed again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from trainckpt.cli import show
from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.machine import Item
from trainckpt.tiers.breaker import CLOSED

if TYPE_CHECKING:
    from trainckpt.tiers.object_store import ObjectStoreTier

PROBE_BYTES = 16 << 20
PLACE = "run's place"


def examine(tier: ObjectStoreTier) -> list[Item]:
    """What the store can do. The first item says whether it can be used at all."""
    key = f"probe/doctor-{secrets.token_hex(8)}"
    try:
        write_s, read_s = _speeds(tier, key)
        creates_only = tier.creates_only()
    except TrainckptError as error:
        return [
            Item(PLACE, ok=False, value=error.message, cure=error.hint or "see docs"),
            _health(tier),
        ]
    finally:
        with contextlib.suppress(TrainckptError):
            tier.remove(key)
    how = "refused where the name is there" if creates_only else "not refused: names are claimed"
    write, read = (show.size(int(PROBE_BYTES / seconds)) for seconds in (write_s, read_s))
    speed = f"writes {write}/s and reads {read}/s ({show.size(PROBE_BYTES)}, one process)"
    return [
        Item(PLACE, ok=True, value=f"{tier.url} can be read and written"),
        Item("create only", ok=True, value=how, needed=False),
        Item("speed", ok=True, value=speed, needed=False),
        _health(tier),
    ]


def _speeds(tier: ObjectStoreTier, key: str) -> tuple[float, float]:
    data = memoryview(bytearray(os.urandom(1 << 20) * (PROBE_BYTES >> 20)))
    begun = time.perf_counter()
    tier.write_parts(key, len(data), [(0, data)])
    written = time.perf_counter()
    tier.read_into(key, 0, data)
    return written - begun, time.perf_counter() - written


def _health(tier: ObjectStoreTier) -> Item:
    """Whether calls go through, as far as this command has seen."""
    found = tier.health()
    value = found.state if not found.last_error else f"{found.state}; met {found.last_error}"
    return Item("calls to the store", found.state == CLOSED, value, "see whether it can be reached",
                needed=False)  # fmt: skip
