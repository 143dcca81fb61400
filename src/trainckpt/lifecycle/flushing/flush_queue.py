"""The queue of one slower tier: snapshots that it lacks, and which of them is copied when.

The newest first, once the tier's interval (`tier_interval`) lets it go. What somebody asked for,
what has a tag and what attempts before this one have left goes in any case. Guarded by its flusher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.deciding.tier_interval import LastCopy, wait_s

if TYPE_CHECKING:
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.run.options import Every
    from trainckpt.lifecycle.run.pending import PendingSave


class Queue:
    """What waits to be copied to one tier.

    Attributes:
        last_copy: What arrived there last.
        handles: Of snapshots that wait, where this attempt took them.
    """

    def __init__(self, every: Every | None, begun_step: int, now_s: float) -> None:
        self.last_copy = LastCopy(begun_step, now_s)
        self.handles: dict[SnapshotName, PendingSave] = {}
        self._every = every
        self._tagged: dict[SnapshotName, bool] = {}
        self._asked: set[SnapshotName] = set()

    def __bool__(self) -> bool:
        return bool(self._tagged)

    def add(self, name: SnapshotName, handle: PendingSave, *, tagged: bool) -> None:
        """A snapshot was taken. Those before it that nobody waits for need not go any more."""
        if self._every is not None:
            for older in [n for n in self._tagged if not self._must(n)]:
                self.forget(older)
        self._tagged[name], self.handles[name] = tagged, handle
        if handle.is_asked:
            self._asked.add(name)

    def add_left(self, name: SnapshotName, *, tagged: bool) -> None:
        """A snapshot that an attempt before this one has left."""
        self._tagged.setdefault(name, tagged)
        self._asked.add(name)

    def next(self, now_s: float, *, all_at_once: bool = False) -> tuple[SnapshotName | None, float]:
        """What is copied next, and in how many seconds (infinite: not before another one comes).

        `all_at_once`: intervals do not count any more.
        """
        newest = max(self._tagged, default=None)
        if newest is None or all_at_once:
            return newest, 0.0
        seconds = wait_s(self._every, newest.step, self.last_copy, now_s)
        asked = [name for name in self._tagged if self._must(name)]
        return (max(asked), 0.0) if seconds > 0 and asked else (newest, seconds)

    def arrived(self, name: SnapshotName) -> list[SnapshotName]:
        """What need not go any more: this one, and what is older and has no tag."""
        waiting = self._tagged.items()
        return [n for n, tagged in waiting if n == name or (n < name and not tagged)]

    def behind(self, name: SnapshotName) -> list[PendingSave]:
        """Handles of what is older, and is not tried before this one has gone."""
        return [handle for older, handle in self.handles.items() if older < name]

    def forget(self, name: SnapshotName) -> None:
        """It does not wait any more."""
        self._tagged.pop(name, None)
        self.handles.pop(name, None)
        self._asked.discard(name)

    def _must(self, name: SnapshotName) -> bool:
        return self._tagged[name] or name in self._asked
