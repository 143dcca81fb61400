"""Taker: copies loads from the memory of other ranks of this host, and verifies them.

To memory that nobody has touched they come by way of some that is: verified there, and copied on as
the pages are made.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.tiers import other_memory
from trainckpt.tiers.direct import HUGE_BYTES, buffers
from trainckpt.tiers.fresh_memory import is_fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.snapshot.blocks import Load
    from trainckpt.tiers.other_memory import Place

STEP_BYTES = HUGE_BYTES  # that caches hold until they are copied on


class Taker:
    """Used by any threads; each has a buffer of its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def take(self, load: Load, place: Place) -> None:
        """Copy a load from where it lies, and verify it.

        Args:
            load: It has memory for all of it.
            place: Of as many bytes, in another process.

        Raises:
            OSError: they cannot be read.
            UnusableSnapshot: a block does not match its digest.
        """
        assert load.into is not None
        if not is_fresh(load.into):
            other_memory.read(place, load.into)
            load.take(load.into)
            return
        for part in _parts(load):
            data = self._buffer(part.last - part.first)
            where = place.address + part.first - load.first
            other_memory.read(place._replace(address=where, num_bytes=len(data)), data)
            part.take(data)

    def _buffer(self, num_bytes: int) -> memoryview:
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < num_bytes:
            (found,) = buffers(1, max(num_bytes, STEP_BYTES))
            self._own.buffer = found
        return found[:num_bytes]


def _parts(load: Load) -> Iterator[Load]:
    """Runs of whole blocks, one behind the other."""
    assert load.into is not None
    block = load.place.region.bytes_per_digest or 1
    step = max(STEP_BYTES // block, 1) * block
    for at in range(load.first, load.last, step):
        to = min(at + step, load.last)
        yield load._replace(first=at, last=to, into=load.into[at - load.first : to - load.first])
