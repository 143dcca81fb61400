"""Upload one rank's snapshots to the slower tiers, within a time limit once the attempt ends.

    saving thread     committed   queues the snapshot at each tier's uploader
    training thread   leave       uploads waiting snapshots at the end, as far as time allows

If only the processes end, no snapshot is lost: it is committed in the run directory. If the host is
lost, all are, where the run directory lies on that host alone. The time limit follows from that,
and shrinks when a rank is asked to leave. Rank 0 decides for all; another rank forwards such a
request through the tier's store keys.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt import status_files
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import LOCAL
from trainckpt.attempt.save_handle import DURABLE
from trainckpt.errors import ConfigurationError, SaveFailed
from trainckpt.notice import OF_MACHINE
from trainckpt.run_directory import run_url
from trainckpt.storage.redact import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from trainckpt.attempt.options import Every
    from trainckpt.attempt.record_writer import AttemptId, RecordWriter
    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.ranks.store import RankStore
    from trainckpt.replicate.tier_uploader import TierUploader
    from trainckpt.run_directory.tier_config import TierConfig
    from trainckpt.storage.base import Tier

    Asked = tuple[str, float | None]  # the reason, and the seconds left; None: unknown


# ---- a tier's interval: `every="10 steps, s3: 100 steps"`
#
# A tier without an interval gets every snapshot that it can keep up with. One with an interval gets
# the first snapshot at or beyond each multiple, or the newest one once the time is over. Requested
# and tagged snapshots, and a run's final one, go to every tier in any case.


WRITING_SHARE = 0.5  # largest share of the time with a save under way


@dataclass(frozen=True)
class LastCopy:
    """The last copy that has arrived in a tier; before the first, where the attempt began.

    Attributes:
        step: Of the snapshot.
        begun_s: Start of the copy, by the monotonic clock.
        took_s: Its duration; None: none was made yet.
    """

    step: int
    begun_s: float
    took_s: float | None = None


def wait_s(every: Every | None, step: int, last: LastCopy, now_s: float) -> float:
    """Return the seconds until the newest snapshot, of this step, is copied.

    Args:
        every: Interval of the tier; None: it has none.
        step, last: Step of the newest snapshot; the last copy that arrived there.
        now_s: By the monotonic clock.

    Returns:
        0: it is due; infinite: another snapshot will be.
    """
    if every is None:
        return 0.0
    if every.steps is not None:
        return 0.0 if step // every.steps > last.step // every.steps else math.inf
    seconds = (last.took_s or 0.0) / WRITING_SHARE if every.auto else every.seconds
    return math.inf if seconds is None else max(last.begun_s + seconds - now_s, 0.0)


def copy_interval_s(
    every: Every | None, last: LastCopy, own_s: float | None, step_s: float | None
) -> float | None:
    """Return the seconds from one copy to the next; None: not known yet.

    Args:
        every: Interval of the tier; None: it has none.
        last: The last copy that arrived there.
        own_s: Seconds from one snapshot in the run directory to the next; None: not known.
        step_s: Seconds of a step; None: not known.
    """
    if every is None or own_s is None:
        return own_s
    if every.steps is not None:
        return None if step_s is None else max(every.steps * step_s, own_s)
    seconds = (last.took_s or 0.0) / WRITING_SHARE if every.auto else every.seconds
    return None if seconds is None else max(seconds, own_s)


def interval_of(every: Every, tier: Tier) -> Every | None:
    """Return the interval of one slower tier; None: it has none."""
    return next((each for name, each in every.tiers if name in (tier.name, tier.url)), None)


def check(every: Every, slower: TierConfig) -> None:
    """Refuse intervals of unknown tiers; in a proof all are allowed."""
    called = {name for tier in slower.tiers for name in (tier.name, tier.url)}
    unknown = [redacted(name) for name, _ in every.tiers if name not in called]
    if unknown and not os.environ.get(run_url.PROVE_VARIABLE):
        names = ", ".join([LOCAL, *(tier.name for tier in slower.tiers)])
        raise ConfigurationError(
            f"every={every.in_full!r}: this run has no tier {unknown[0]!r}",
            hint=f"use one of {names}, or add it to the option tiers",
        )


# ---- uploads to all slower tiers


CAUTION = 1.25  # a save or copy may take so much longer than the ones measured
UNLIMITED_S = 86400.0
UNASKED_S = 60.0  # without a deadline, and without a supervisor to finish the uploads


POLL_S = 1.0


class UploadDeadline:
    """Upload deadline. Training thread.

    Attributes:
        shortened_by: Why the deadline was shortened, or "".
        asked: Returns the request for this rank to leave, if any.
    """

    def __init__(
        self,
        limit_s: float,
        asked: Callable[[], Asked | None] = lambda: None,
        limit_of: Callable[[str, float | None], float] = lambda reason, left_s: math.inf,
    ) -> None:
        """Start the clock.

        Args:
            limit_s: Seconds without any request to leave.
            asked: Returns a request for this rank to leave, if any; may repeat one.
            limit_of: Returns the seconds still usable, from the reason and the seconds left.
        """
        self.shortened_by, self.asked = "", asked
        self._until_s = time.monotonic() + limit_s
        self._limit_of = limit_of
        self._seen_reasons: set[str] = set()

    def left_s(self) -> float:
        """Return the seconds left, never negative."""
        return max(self._until_s - time.monotonic(), 0.0)

    def update(self, forwarded: Sequence[Any] | None) -> None:
        """Rank 0, every `POLL_S`: shorten the deadline by its own request, or another rank's."""
        for request in (self.asked(), forwarded):
            if request is None or request[0] in self._seen_reasons:
                continue
            reason, left_s = request  # once: the time left only shrinks, and a copy is not quicker
            self._seen_reasons.add(reason)
            limit_s = max(self._limit_of(reason, left_s), 0.0)
            if limit_s < self.left_s():
                self.shortened_by, self._until_s = reason, time.monotonic() + limit_s
                logger.info(
                    "%s: the run is finished and saved; copies to slower tiers get %.0f s more",
                    reason,
                    limit_s,
                )


@dataclass(frozen=True)
class UploadContext:
    """Shared inputs of every uploader of a rank.

    Attributes:
        run_tier: The run directory.
        arena_first: The run directory, read from this rank's arenas where they hold the bytes.
        channel: Between the ranks.
        record_writer: The attempt's record.
        run, number, keep_last: As in `committer.ManifestDefaults`.
    """

    run_tier: Tier
    arena_first: ArenaFirstReader
    channel: RankStore
    record_writer: RecordWriter
    run: str
    number: AttemptId
    keep_last: int


class ArenaFirstReader:
    """Reads shard files from this rank's arenas, else from the run directory."""

    def __init__(
        self, run_tier: Tier, copy_from: Callable[[str, int, memoryview], bool] | None
    ) -> None:
        self._run_tier, self._copy_from = run_tier, copy_from
        self.name, self.url = run_tier.name, run_tier.url
        self.size, self.read, self.list = run_tier.size, run_tier.read, run_tier.list
        self.read_parts = run_tier.read_parts

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Read block by block: an arena may be reused for the next save in between."""
        if self._copy_from is None or not self._copy_from(key, first_byte, into):
            self._run_tier.read_into(key, first_byte, into)


class Uploads:
    """The uploaders of one rank.

    Attributes:
        uploaders: One for each slower tier, nearest first.
    """

    def __init__(self, uploaders: Sequence[TierUploader] = (), durable: str = LOCAL) -> None:
        self.uploaders = tuple(uploaders)
        self._durable = durable

    def start(self) -> None:
        """Start every uploader at the beginning of the attempt."""
        for uploader in self.uploaders:
            uploader.start()

    def on_commit(self, event: CommitEvent) -> None:
        """Queue a snapshot committed in the run directory, as `TierUploader.offer`."""
        if self._durable == LOCAL:
            event.handle.reach(DURABLE)
        faults = []
        for uploader in self.uploaders:
            try:
                uploader.offer(event.manifest, event.handle, event.num_bytes)
            except Exception as error:  # noqa: BLE001 - the other tiers get their copies
                faults.append(error)
                if uploader.tier.name == self._durable:
                    why = SaveFailed(f"not copied to {self._durable}: {error or repr(error)}")
                    event.handle.fail_durable(why, for_good=True)
        if faults:
            raise faults[0]

    @property
    def busy(self) -> list[str]:
        """Full names of snapshots that are being copied."""
        return [name for uploader in self.uploaders if (name := uploader.busy) is not None]

    def tiers_with(self, snapshot: str | None) -> list[str]:
        """Return the names of tiers that hold the final snapshot of an attempt."""
        slower = [u.tier.name for u in self.uploaders if u.newest == snapshot]
        return [LOCAL, *slower] if snapshot is not None else []

    def predicted(self) -> list[tuple[str, float | None]]:
        """Return each slower tier's name, and the predicted seconds for the newest snapshot."""
        return [(uploader.tier.name, uploader.copy_s()) for uploader in self.uploaders]

    def limit_s(self, reason: str, left_s: float | None, *, on_this_host: bool) -> float:
        """Return the seconds that `drain` may take at a stop for this reason.

        Args:
            reason: Reason of the stop.
            left_s: Seconds until the deadline.
            on_this_host: The run directory lies on this machine alone.
        """
        if not self.uploaders:
            return 0.0
        if on_this_host and reason.startswith(OF_MACHINE):  # what is not copied is lost
            return UNLIMITED_S if left_s is None else max(left_s, 0.0)
        # Else the supervisor or the next attempt copies what is left.
        supervised, predicted_s = status_files.is_supervised(), self.uploaders[0].predicted_s()
        if left_s is None:
            return 0.0 if supervised else UNASKED_S
        fits = predicted_s is not None and CAUTION * predicted_s <= left_s
        if not fits and (supervised or predicted_s is not None):
            return 0.0
        return max(left_s, 0.0)

    def drain(self, drain: UploadDeadline) -> None:
        """Upload waiting snapshots at the end, within the deadline. Every rank; the last call."""
        for uploader in self.uploaders:
            uploader.drain(drain)

    def abandon(self) -> None:
        """Abandon all uploads: the process ends."""
        for uploader in self.uploaders:
            uploader.stop()
