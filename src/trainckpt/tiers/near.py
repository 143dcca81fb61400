"""A tier of which some files are held in this host's memory too: those are read there.

Memory is nearer, not truer: whoever reads verifies every digest, and reads again from the tier
itself if one does not match. But what this launch has verified on its way here, and is the same
still, need not be verified twice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.held import Held, Stamp
    from trainckpt.tiers.memory import MemoryPlace


class NearTier:
    """Reads of one snapshot, each file from memory if it is there.

    Attributes:
        num_threads: That may copy from memory at once.
        used: Files that were read from memory, sorted by when they were first asked for.
        vouched: Of files that were verified on their way to memory, the stamps they had then.
    """

    def __init__(self, tier: Readable, place: MemoryPlace | None) -> None:
        self.name, self.url = tier.name, tier.url
        self.num_threads = 1
        self.used: list[str] = []
        self.vouched: Mapping[str, Stamp] = {}
        self._tier = tier
        self._place = place
        self._held: dict[str, Held | None] = {}

    def size(self, key: str) -> int | None:
        """As the tier says: what is only in memory does not exist."""
        return self._tier.size(key)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """As the tier."""
        return self._tier.read(key, max_bytes=max_bytes)

    def list(self, folder: str) -> list[str]:
        """As the tier."""
        return self._tier.list(folder)

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """From memory, or as the tier."""
        held = self._find(key)
        if held is None or first_byte + len(into) > len(held.data):
            self._tier.read_into(key, first_byte, into)
        else:
            _fill(held, key, first_byte, into)

    def read_parts(
        self, key: str, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None:
        """From memory, or as the tier."""
        held = self._find(key)
        if held is None or any(at + len(into) > len(held.data) for at, into in parts):
            self._tier.read_parts(key, parts, done)
            return

        def one(number: int) -> None:
            _fill(held, key, *parts[number])
            done(number)

        with Workers(self.num_threads, "trainckpt-read") as workers:
            for number in range(len(parts)):
                workers.submit(partial(one, number))
            workers.settle()

    def is_near(self, key: str) -> bool:
        """Whether a file is in memory."""
        return self._find(key) is not None

    def is_verified(self, key: str) -> bool:
        """Whether a file is in memory, and is what was verified on its way there."""
        held = self._find(key) if key in self.vouched else None
        return held is not None and held.stamp == self.vouched[key]

    def lend(self, key: str, first_byte: int, num_bytes: int) -> memoryview | None:
        """These bytes where they lie in memory, not to be written; None if they do not.

        They stay as they are as long as anybody has the view.
        """
        held = self._find(key)
        if held is None or first_byte + num_bytes > len(held.data):
            return None
        return held.data[first_byte : first_byte + num_bytes]

    def close(self) -> None:
        """Let the memory be written again, but for what was lent and is still held."""
        for held in self._held.values():
            if held is not None:
                held.close()
        self._held.clear()

    def _find(self, key: str) -> Held | None:
        if key not in self._held:
            held = None
            if self._place is not None:
                folder, _, name = key.rpartition("/")
                held = self._place.held(folder, name)
            if held is not None:
                self.used.append(key)
            self._held[key] = held
        return self._held[key]


def _fill(held: Held, key: str, first_byte: int, into: memoryview) -> None:
    try:
        held.fill(first_byte, into)
    except OSError as error:
        raise UnusableSnapshot(f"{key} in memory cannot be read: {error}") from error
