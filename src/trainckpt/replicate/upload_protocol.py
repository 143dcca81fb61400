"""Upload protocol between ranks for one tier, and when its store keys are deleted.

    <n>/order       rank 0 to all: the snapshot, or why none of it can be copied; the last one
                    says that it is over
    <n>/report/<r>  rank r to rank 0: the result of its share
    <n>/verdict     rank 0 to all
    signs, ending   counters, all to rank 0: blocks go on; so many ranks make a file durable
    left            rank 0 to all, at the end: it is over
    hurry           any rank to rank 0, at the end: it was asked to leave

The store holds a key until it is deleted, and a run copies for weeks. A rank that has reported has
read the order, and the verdict before it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, UnusableSnapshot
from trainckpt.ranks.store import DAY_S
from trainckpt.replicate.uploads import POLL_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.ranks.store import RankStore
    from trainckpt.replicate.uploads import UploadDeadline

SIGN_S = 30.0
HANGS_AFTER_S, ENDS_WITHIN_S = 300.0, 3600.0  # without a sign; of a file that is made durable
_SIGNS, _ENDING, _HURRY = "signs", "ending", "hurry"


def failure(error: Exception, rank: int) -> dict[str, Any]:
    """Return a report or verdict of an error; `lost`: nothing is left to try again with."""
    message = getattr(error, "message", None) or str(error) or repr(error)
    return {"error": f"rank {rank}: {message}", "lost": isinstance(error, UnusableSnapshot)}


def await_end(channel: RankStore, drain: UploadDeadline) -> None:
    """Wait until rank 0 ends the uploads, on any other rank; forward a request to leave."""
    has_forwarded = False
    while not channel.wait("left", min(drain.left_s(), POLL_S)) and drain.left_s() > 0:
        if not has_forwarded and (asked := drain.leave_request()) is not None:
            has_forwarded = True
            channel.put(_HURRY, list(asked))


class UploadRound:
    """Upload rounds of one rank and tier. One thread."""

    def __init__(self, channel: RankStore) -> None:
        """`channel`: a connection of its own, with keys of this tier."""
        self._channel = channel
        self._rank, self._size = channel.world.rank, channel.world.size
        self._number = 0
        self._progress_s, self._is_syncing = 0.0, False

    def publish_order(self, order: dict[str, Any]) -> None:
        """Rank 0: publish the next order."""
        self._number += 1
        self._channel.put(f"{self._number}/order", order)

    def gather_reports(self) -> list[dict[str, Any]]:
        """Rank 0: return the reports of all other ranks, in rank order."""
        number, others = self._number, range(1, self._size)
        reports = [self._channel.get(f"{number}/report/{rank}", DAY_S) for rank in others]
        self._delete_keys(f"{number}/order", f"{number - 1}/verdict")
        return reports

    def publish_verdict(self, verdict: dict[str, Any]) -> None:
        """Rank 0: publish the verdict."""
        self._channel.put(f"{self._number}/verdict", verdict)

    def end(self) -> None:
        """Rank 0: publish that no more orders come."""
        self._channel.put(f"{self._number + 1}/order", {"over": True})

    def next_order(self) -> dict[str, Any] | None:
        """Any other rank: wait for the next order; None: it is over."""
        key = f"{self._number + 1}/order"
        while not self._channel.wait(key, DAY_S):
            pass  # idle, and no gather: a run may copy less often than once a day
        order: dict[str, Any] = self._channel.peek(key)
        if "over" in order:
            return None
        self._number += 1
        return order

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: send the result of its share; return the verdict."""
        key = f"{self._number}/report/{self._rank}"
        self._channel.put(key, report)
        verdict: dict[str, Any] = self._channel.get(f"{self._number}/verdict", DAY_S)
        self._delete_keys(key)
        return verdict

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Wrap the copy of one file."""
        try:
            yield
        finally:
            if self._is_syncing:
                self._is_syncing = False
                self._count(_ENDING, -1)

    def report_progress(self, num_bytes: int) -> None:
        """Signal progress: `num_bytes` of a file come next; 0: the file is made durable (may be
        slow).
        """
        now_s = time.monotonic()
        if num_bytes == 0:
            self._is_syncing = True
            self._count(_ENDING, 1)
        elif now_s - self._progress_s > SIGN_S:
            self._progress_s = now_s
            self._count(_SIGNS, 1)

    def _count(self, key: str, by: int) -> None:
        with contextlib.suppress(NoAgreement):  # without the store no rank reads it
            self._channel.count(key, by)

    def _delete_keys(self, *keys: str) -> None:
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to delete
            self._channel.forget(keys)


class ProgressWatchdog:
    """Progress watchdog of rank 0, beside the thread that copies."""

    def __init__(self, channel: RankStore) -> None:
        """`channel`: the keys of this tier, on a connection without waits."""
        self._channel = channel
        self._counts = 0, 0
        self._since_s: float | None = None

    def forwarded_request(self) -> list[Any] | None:
        """Return another rank's request to leave; None: there is none."""
        with contextlib.suppress(NoAgreement):
            request: list[Any] | None = self._channel.peek(_HURRY)
            return request
        return None

    def is_stuck(self, now_s: float) -> bool:
        """Return True if no rank made progress for too long. Call it again and again."""
        counts = self._counts
        with contextlib.suppress(NoAgreement):
            counts = self._channel.count(_SIGNS, 0), self._channel.count(_ENDING, 0)
        if self._since_s is None or counts != self._counts:
            self._counts, self._since_s = counts, now_s
        return now_s - self._since_s > (ENDS_WITHIN_S if counts[1] > 0 else HANGS_AFTER_S)
