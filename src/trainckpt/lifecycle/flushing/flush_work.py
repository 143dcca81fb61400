"""What a flusher works with: the run's place, and what stands nearer than that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.lifecycle.run.attempt_log import AttemptLog
    from trainckpt.lifecycle.run.attempt_number import AttemptNumber
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.base import Tier


@dataclass(frozen=True)
class Work:
    """What every flusher of a rank works with.

    Attributes:
        place: The run's place.
        near: The same, but what stands in this rank's arenas is read there.
        channel: Between the ranks.
        log: The attempt's record.
        run, number, keep_last: As `writer.Facts`.
    """

    place: Tier
    near: Near
    channel: Channel
    log: AttemptLog
    run: str
    number: AttemptNumber
    keep_last: int

    @property
    def attempt(self) -> int:
        """Its number now."""
        return self.number.value


class Near:
    """Reads of shard files: from this rank's arenas where they stand there, else from the place."""

    def __init__(
        self, place: Tier, copy_from: Callable[[str, int, memoryview], bool] | None
    ) -> None:
        self._place, self._copy_from = place, copy_from
        self.name, self.url = place.name, place.url
        self.size, self.read, self.list = place.size, place.read, place.list
        self.read_parts = place.read_parts

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Block by block: an arena may be given up for the next save in between."""
        if self._copy_from is None or not self._copy_from(key, first_byte, into):
            self._place.read_into(key, first_byte, into)
