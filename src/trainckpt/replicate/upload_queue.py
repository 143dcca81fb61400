"""The upload queue of one slower tier: snapshots it lacks, and the order to copy them in.

The newest goes first, once the tier's interval (`tier_interval`) allows it. Requested and tagged
snapshots, and those left by earlier attempts, go in any case. The uploader's lock guards the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.replicate.tier_interval import LastCopy, wait_s

if TYPE_CHECKING:
    from trainckpt.attempt.options import Every
    from trainckpt.attempt.save_handle import SaveHandle
    from trainckpt.format.names import SnapshotName


class UploadQueue:
    """Snapshots that wait to be copied to one tier.

    Attributes:
        last_copy: The last copy that arrived there.
        handles: Handles of waiting snapshots of this attempt.
    """

    def __init__(self, every: Every | None, begun_step: int, now_s: float) -> None:
        self.last_copy = LastCopy(begun_step, now_s)
        self.handles: dict[SnapshotName, SaveHandle] = {}
        self._every = every
        self._tagged: dict[SnapshotName, bool] = {}
        self._requested: set[SnapshotName] = set()

    def __bool__(self) -> bool:
        return bool(self._tagged)

    def add(self, name: SnapshotName, handle: SaveHandle, *, tagged: bool) -> None:
        """Add a snapshot; under an interval, drop older ones that no request or tag needs."""
        if self._every is not None:
            for older in [n for n in self._tagged if not self._is_required(n)]:
                self.remove(older)
        self._tagged[name], self.handles[name] = tagged, handle
        if handle.is_asked:
            self._requested.add(name)

    def add_earlier(self, name: SnapshotName, *, tagged: bool) -> None:
        """Add a snapshot left by an earlier attempt."""
        self._tagged.setdefault(name, tagged)
        self._requested.add(name)

    def next(self, now_s: float, *, all_at_once: bool = False) -> tuple[SnapshotName | None, float]:
        """Return the next snapshot, and the seconds until then (infinite: not before another one).

        `all_at_once`: intervals no longer count.
        """
        newest = max(self._tagged, default=None)
        if newest is None or all_at_once:
            return newest, 0.0
        seconds = wait_s(self._every, newest.step, self.last_copy, now_s)
        asked = [name for name in self._tagged if self._is_required(name)]
        return (max(asked), 0.0) if seconds > 0 and asked else (newest, seconds)

    def superseded_by(self, name: SnapshotName) -> list[SnapshotName]:
        """Return the snapshots that need no copy now: this one, and older ones without a tag."""
        waiting = self._tagged.items()
        return [n for n, tagged in waiting if n == name or (n < name and not tagged)]

    def older_handles(self, name: SnapshotName) -> list[SaveHandle]:
        """Return handles of older snapshots, which are not tried before this one has gone."""
        return [handle for older, handle in self.handles.items() if older < name]

    def remove(self, name: SnapshotName) -> None:
        """Remove a snapshot from the queue."""
        self._tagged.pop(name, None)
        self.handles.pop(name, None)
        self._requested.discard(name)

    def _is_required(self, name: SnapshotName) -> bool:
        return self._tagged[name] or name in self._requested
