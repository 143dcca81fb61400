"""Read one snapshot from several tiers, each file from the nearest tier with a copy.

The nearest copy may be bad: readers verify every digest. After a mismatch the reader examines all
copies, and `chosen` names the tier to read each file from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, TrainckptError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.storage.base import Tier


class TieredReader:
    """Reads of one snapshot.

    Attributes:
        tiers: Nearest first; the first one is the run directory.
        sizes: Key -> length, once known. A copy of another length does not count.
        read_from: Key -> number of the tier it was read from.
    """

    def __init__(self, tiers: Sequence[Tier], chosen: Mapping[str, int] | None = None) -> None:
        self.tiers = tuple(tiers)
        self.name, self.url = tiers[0].name, tiers[0].url
        self.sizes: Mapping[str, int] = {}
        self.read_from: dict[str, int] = dict(chosen or {})

    def size(self, key: str) -> int | None:
        """Return the size of the copy to read."""
        return self._tier_of(key).size(key)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Read from the copy's tier; see `base.Readable`."""
        return self._tier_of(key).read(key, max_bytes=max_bytes)

    def list(self, folder: str) -> list[str]:
        """Return the names in the run directory's folder."""
        return self.tiers[0].list(folder)

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
        wanted = self.sizes.get(key)
        silent: list[TrainckptError] = []
        for number, tier in enumerate(self.tiers):
            try:
                size = tier.size(key)
            except TrainckptError as error:
                silent.append(error)
                continue
            if size is not None and size == (size if wanted is None else wanted):
                return number
        for refusal in silent:
            if isinstance(refusal, TierUnavailable):
                raise refusal
        return 0
