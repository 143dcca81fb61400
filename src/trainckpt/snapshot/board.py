"""Board: while ranks of a host read their shares, each says what is there, and takes what is.

    Board       entries of sixteen bytes in the memory of the rank that has read it: which run of
                blocks, and where it lies; zero: nothing yet. Behind them, which runs this rank
                asks for, and where it offers memory for them
    OtherBoard  that of another rank
Boards are written by one process and only read by others; whatever stands there, what is copied
is verified.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.format import digest
from trainckpt.tiers import other_memory
from trainckpt.tiers.direct import address, memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainckpt.snapshot.blocks import Load

NUM_ENTRIES = 1 << 16  # what is read beyond that is not said; pages are made as it is
_ENTRY_BYTES = 16


class Board:
    """What this rank has read. Written by any thread, read by other processes."""

    def __init__(self) -> None:
        self._memory = memory((2 * NUM_ENTRIES + 1) * _ENTRY_BYTES)
        self._numbers = self._memory.cast("Q")
        self._used, self._lock = 0, threading.Lock()

    @property
    def place(self) -> other_memory.Place:
        """Where others find it."""
        return other_memory.place_of(self._memory)

    def say(self, load: Load) -> None:
        """A load lies verified where it belongs; it is one that has memory of its own."""
        assert load.into is not None
        where, name = address(load.into), name_of(load)
        with self._lock:
            if where is None or self._used == NUM_ENTRIES:
                return
            at = 2 * self._used
            self._numbers[at + 1] = name
            self._numbers[at] = where  # the last of it: before, there is none
            self._used += 1

    def ask(self, descriptor: int, loads: Iterable[Load]) -> None:
        """What others may fill in, through this process's descriptor. Once."""
        first, asked = NUM_ENTRIES * 2, list(loads)[:NUM_ENTRIES]
        for at, load in enumerate(asked, NUM_ENTRIES + 1):
            assert load.into is not None
            self._numbers[2 * at], self._numbers[2 * at + 1] = (
                address(load.into) or 0,
                name_of(load),
            )
        self._numbers[first + 1] = descriptor
        self._numbers[first] = len(asked) + 1  # the last of it


class Asked(NamedTuple):
    """What another rank asks for.

    Attributes:
        descriptor: Of that process, for its memory.
        where: Name of a load -> where in that memory.
    """

    descriptor: int
    where: Mapping[int, int]


class OtherBoard:
    """That of another rank."""

    _AT_ONCE = 256  # entries

    def __init__(self, place: other_memory.Place) -> None:
        self._place, self._read = place, 0
        self.process = place.process

    def news(self) -> list[tuple[int, int]]:
        """Name and address of what was said since the last time."""
        first = self._read * _ENTRY_BYTES
        behind = min(self._place.num_bytes, NUM_ENTRIES * _ENTRY_BYTES)
        numbers = self._numbers(first, min(self._AT_ONCE * _ENTRY_BYTES, behind - first))
        news: list[tuple[int, int]] = []
        for at in range(0, len(numbers), 2):
            if not numbers[at]:
                break
            news.append((numbers[at + 1], numbers[at]))
        self._read += len(news)
        return news

    def asked(self) -> Asked | None:
        """What it asks for; None: nothing yet."""
        first = NUM_ENTRIES * _ENTRY_BYTES
        head = self._numbers(first, _ENTRY_BYTES)
        if not head or not head[0]:
            return None
        num = min(head[0] - 1, NUM_ENTRIES)
        numbers = self._numbers(first + _ENTRY_BYTES, num * _ENTRY_BYTES)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return Asked(head[1], {name: where for where, name in pairs})

    def _numbers(self, first: int, num_bytes: int) -> memoryview:
        """Of that part of it; none where it cannot be read."""
        found = memoryview(bytearray(max(num_bytes, 0)))
        try:
            where = other_memory.Place(self.process, self._place.address + first, len(found))
            if found:
                other_memory.read(where, found)
        except OSError:
            return memoryview(b"").cast("Q")
        return found.cast("Q")


def name_of(load: Load) -> int:
    """The same on every rank for the same bytes of the same file."""
    assert load.into is not None
    text = f"{load.place.key}\n{load.first_byte}\n{len(load.into)}"
    return int(digest.digest(text.encode())[:16], 16)
