"""Read one snapshot from several tiers, each file from the nearest tier with a copy.

The nearest copy may be bad: readers verify every digest. After a mismatch the reader examines all
copies, and `chosen` names the tier to read each file from.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.storage.arena import MappedShard
    from trainckpt.storage.base import Readable, Tier
    from trainckpt.storage.shared_memory import SharedMemoryDir


class TieredReader:
    """Reads of one snapshot.

    Attributes:
        tiers: Nearest first; the first one is the run directory.
        sizes: Key -> length, once known. A copy of another length does not count.
        read_from: Key -> number of the tier it was read from.
    """

    def __init__(self, tiers: Sequence[Tier], chosen: Mapping[str, int] | None = None) -> None:
        self.tiers = tuple(tiers)
        self.name, self.url, self.list = tiers[0].name, tiers[0].url, tiers[0].list
        self.sizes: Mapping[str, int] = {}
        self.read_from: dict[str, int] = dict(chosen or {})

    def size(self, key: str) -> int | None:
        """Return the size of the copy to read."""
        return self._tier_of(key).size(key)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Read from the copy's tier; see `base.Readable`."""
        return self._tier_of(key).read(key, max_bytes=max_bytes)

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Fill from the copy's tier; see `base.Readable`."""
        self._tier_of(key).read_into(key, first_byte, into)

    def read_parts(
        self, key: str, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None:
        """Fill from the copy's tier; see `base.Readable`."""
        self._tier_of(key).read_parts(key, parts, done)

    def number_of(self, key: str) -> int:
        """Return the number of the tier a file is read from."""
        if key not in self.read_from:
            self.read_from[key] = self._find(key)
        return self.read_from[key]

    def _tier_of(self, key: str) -> Tier:
        return self.tiers[self.number_of(key)]

    def _find(self, key: str) -> int:
        """Return the nearest tier with a copy of the right length, or 0 if none has one.

        A tier without an answer is an error then.
        """
        if len(self.tiers) == 1:
            return 0
        silent: TierUnavailable | None = None
        for number, tier in enumerate(self.tiers):
            try:
                size = tier.size(key)
            except TierUnavailable as error:
                silent = silent or error
            except TrainckptError:
                pass
            else:
                if size is not None and size == self.sizes.get(key, size):
                    return number
        if silent is not None:
            raise silent
        return 0


# ---- files in this host's shared memory, read from there
#
# Memory is faster, not more trustworthy: readers verify every digest, and read a mismatch again
# from the tier itself.


class MemoryCachedTier:
    """Reads of one snapshot, each file from memory if it is there.

    Attributes:
        num_threads: Threads copying from memory at once.
        used: Files read from memory, in order of first use.
    """

    def __init__(
        self, tier: Readable, memory_dir: SharedMemoryDir | None, *, num_threads: int = 1
    ) -> None:
        self.name, self.url = tier.name, tier.url
        # A file in memory only does not exist.
        self.size, self.read, self.list = tier.size, tier.read, tier.list
        self.num_threads = num_threads
        self.used: list[str] = []
        self._tier = tier
        self._memory_dir = memory_dir
        self._held: dict[str, MappedShard | None] = {}

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Fill `into` from memory if possible, else from the tier."""
        held = self._find(key)
        if held is None or first_byte + len(into) > len(held.data):
            self._tier.read_into(key, first_byte, into)
        else:
            _fill(held, key, first_byte, into)

    def read_parts(
        self, key: str, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None:
        """Fill the parts from memory if possible, else from the tier."""
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
        """Return True if a file is in memory."""
        return self._find(key) is not None

    def lend(self, key: str, first_byte: int, num_bytes: int) -> memoryview | None:
        """Return a read-only view of these bytes in memory; None if they are not there.

        Read-only by contract, not enforced. The bytes stay unchanged as long as the view exists.
        """
        held = self._find(key)
        if held is None or first_byte + num_bytes > len(held.data):
            return None
        return held.data[first_byte : first_byte + num_bytes]

    def close(self) -> None:
        """Unlock the memory, except for views still in use."""
        for held in self._held.values():
            if held is not None:
                held.close()
        self._held.clear()

    def _find(self, key: str) -> MappedShard | None:
        if key not in self._held:
            held = None
            if self._memory_dir is not None:
                folder, _, name = key.rpartition("/")
                held = self._memory_dir.held(folder, name)
            if held is not None:
                self.used.append(key)
            self._held[key] = held
        return self._held[key]


def _fill(held: MappedShard, key: str, first_byte: int, into: memoryview) -> None:
    try:
        held.fill(first_byte, into)
    except OSError as error:
        raise UnusableSnapshot(f"{key} in memory cannot be read: {error}") from error
