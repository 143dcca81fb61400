"""Taker: has loads from the memory of other ranks of this host, and verifies them.

What those ranks have filled in themselves (`handed_memory`) is verified where it lies. Else it is
copied: to memory that nobody has touched by way of some that is, verified there, and copied on as
the pages are made.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers import other_memory
from trainckpt.tiers.direct import HUGE_BYTES, address, buffers
from trainckpt.tiers.fresh_memory import is_fresh
from trainckpt.tiers.handed_memory import ends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.snapshot.blocks import Load
    from trainckpt.tiers.handed_memory import Offered
    from trainckpt.tiers.other_memory import Place

STEP_BYTES = HUGE_BYTES  # that caches hold until they are copied on


class Taker:
    """Used by any threads; each has a buffer of its own."""

    def __init__(self, offered: Offered | None = None) -> None:
        """`offered`: memory of loads that others may fill in."""
        self._own, self._offered = threading.local(), offered

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
        if self._offered is not None and self._offered.take_back(load.into):
            with suppress(UnusableSnapshot):
                self._complete(load, place)
                return
        if not is_fresh(load.into):
            other_memory.read(place, load.into)
            load.take(load.into)
            return
        for part in _parts(load):
            data = self._buffer(part.last - part.first)
            where = place.address + part.first - load.first
            other_memory.read(place._replace(address=where, num_bytes=len(data)), data)
            part.take(data)

    def _complete(self, load: Load, place: Place) -> None:
        """Its whole pages are there."""
        assert load.into is not None
        for first, last in ends(address(load.into) or 0, len(load.into)):
            part = place._replace(address=place.address + first, num_bytes=last - first)
            other_memory.read(part, load.into[first:last])
        load.take(load.into)

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
