"""The tier uploader: one rank's part in copying this attempt's snapshots to one slower tier.

    rank 0         takes the newest snapshot that the tier lacks, and publishes it (an order)
    every rank     copies its share, reports
    rank 0         commits there, prunes there, publishes the result (a verdict)

On a thread of its own, over keys of its own: training never waits for it, and a tier that hangs
delays no other. The newest goes first; older ones are then left out, except tagged ones. A tier
with an interval of its own gets fewer (`UploadQueue`). A failed copy is tried again: with the next
snapshot, or after a while.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.live_status import UploadNow
from trainckpt.attempt.log import logger
from trainckpt.attempt.save_handle import DURABLE
from trainckpt.errors import (
    NoAgreement,
    SaveFailed,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.format.save_history import NOT_COPIED
from trainckpt.ranks import threads
from trainckpt.ranks.store import DAY_S
from trainckpt.replicate.uploads import POLL_S, LastCopy, copy_interval_s, wait_s
from trainckpt.run_directory.tier_config import COMMITS, TROUBLE, newest_commits
from trainckpt.snapshot import catalog, prune, tier_copy
from trainckpt.snapshot.attempt_history import newest, read_attempts
from trainckpt.snapshot.followed_run import FollowedRun
from trainckpt.storage.base import health_of
from trainckpt.storage.retry import CLOSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.attempt.options import Every
    from trainckpt.attempt.save_handle import SaveHandle
    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.store import RankStore
    from trainckpt.replicate.uploads import UploadContext, UploadDeadline
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import Tier


# ---- the upload queue: snapshots a tier lacks, in order
#
# The newest goes first, once the tier's interval (`uploads`) allows it. Requested and tagged
# snapshots, and those left by earlier attempts, go in any case. The uploader's lock guards the
# queue.


@dataclass
class QueuedSnapshot:
    """A snapshot that waits to be copied to one tier.

    Attributes:
        handle: None for a snapshot left by an earlier attempt.
        is_tagged: It has a tag.
        is_requested: It goes whatever the tier's interval, as one with a tag does.
    """

    handle: SaveHandle | None
    is_tagged: bool
    is_requested: bool


class UploadQueue:
    """Snapshots that wait to be copied to one tier.

    Attributes:
        last_copy: The last copy that arrived there.
    """

    def __init__(self, every: Every | None, begun_step: int, now_s: float) -> None:
        self.last_copy = LastCopy(begun_step, now_s)
        self._every = every
        self._waiting: dict[SnapshotName, QueuedSnapshot] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: SnapshotName, handle: SaveHandle, *, tagged: bool) -> None:
        """Add a snapshot; under an interval, drop older ones that no request or tag needs."""
        if self._every is not None:
            required = self._required()
            self._waiting = {n: one for n, one in self._waiting.items() if n in required}
        was_requested = name in self._waiting and self._waiting[name].is_requested
        self._waiting[name] = QueuedSnapshot(handle, tagged, handle.is_requested or was_requested)

    def add_earlier(self, name: SnapshotName, *, tagged: bool) -> None:
        """Add a snapshot left by an earlier attempt."""
        self._waiting.setdefault(name, QueuedSnapshot(None, tagged, True)).is_requested = True

    def next(self, now_s: float, *, all_at_once: bool = False) -> tuple[SnapshotName | None, float]:
        """Return the next snapshot, and the seconds until then (infinite: not before another one).

        `all_at_once`: intervals no longer count.
        """
        newest = max(self._waiting, default=None)
        if newest is None or all_at_once:
            return newest, 0.0
        seconds = wait_s(self._every, newest.step, self.last_copy, now_s)
        required = self._required()
        return (max(required), 0.0) if seconds > 0 and required else (newest, seconds)

    def superseded_by(self, name: SnapshotName) -> list[SnapshotName]:
        """Return the snapshots that need no copy now: this one, and older ones without a tag."""
        waiting = self._waiting.items()
        return [n for n, one in waiting if n == name or (n < name and not one.is_tagged)]

    def older_handles(self, name: SnapshotName) -> list[SaveHandle]:
        """Return handles of older snapshots, which are not tried before this one has gone."""
        return [one.handle for n, one in self._waiting.items() if n < name and one.handle]

    def handle(self, name: SnapshotName) -> SaveHandle | None:
        """Return the handle of a waiting snapshot of this attempt."""
        return self._waiting[name].handle if name in self._waiting else None

    def remove(self, name: SnapshotName) -> SaveHandle | None:
        """Remove a snapshot from the queue; return its handle, if it has one."""
        removed = self._waiting.pop(name, None)
        return None if removed is None else removed.handle

    def _required(self) -> list[SnapshotName]:
        return [n for n, one in self._waiting.items() if one.is_tagged or one.is_requested]


# ---- the upload protocol between ranks
#
#     <n>/order       rank 0 to all: the snapshot, or why none of it can be copied; the last one
#                     says that it is over
#     <n>/report/<r>  rank r to rank 0: the result of its share
#     <n>/verdict     rank 0 to all
#     signs, ending   counters, all to rank 0: blocks go on; so many ranks make a file durable
#     left            rank 0 to all, at the end: it is over
#     hurry           any rank to rank 0, at the end: it was asked to leave
#
# The store holds a key until it is deleted, and a run copies for weeks. A rank that has reported
# has read the order, and the verdict before it.


SIGN_S = 30.0
HANGS_AFTER_S, ENDS_WITHIN_S = 300.0, 3600.0  # without a sign; of a file that is made durable
_SIGNS, _ENDING, _HURRY = "signs", "ending", "hurry"


def failure(error: Exception, rank: int) -> dict[str, Any]:
    """Return a report or verdict of an error; `lost`: nothing is left to try again with."""
    message = getattr(error, "message", None) or str(error) or repr(error)
    return {"error": f"rank {rank}: {message}", "lost": isinstance(error, UnusableSnapshot)}


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
        """Signal that `num_bytes` of a file come next; 0: it is made durable, which may be slow."""
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


# ---- the uploader


FIRST_RETRY_S, MOST_RETRY_S = 15.0, 600.0
STOPPED_WITHIN_S = 2.0
LEFT_BEHIND = "%s: leaving; the next start or `trainckpt flush` copies missing snapshots to %s"


class UploadAbandoned(Exception):
    """The upload was abandoned: this rank leaves."""


class TierUploader:
    """Copies snapshots to one tier.

    Attributes:
        tier: The slower tier.
        newest: Full name of the newest snapshot known to be committed there.
        busy: Full name of the snapshot that is being copied.
        seconds_per_byte: Per byte of one rank's files, from the last upload; None before the first.
        skipped, failed: Number of snapshots left out for newer ones; number of failed tries.
        every: Interval of copies that no call asked for; None: always.
        created: Rank 0: when `newest` was taken, by the wall clock; None: unknown.
        written_bytes: Rank 0: bytes of all snapshots that were copied there.
        damaged: Number of snapshots given up since a copy in the run directory is damaged.
    """

    def __init__(
        self,
        tier: Tier,
        work: UploadContext,
        number: int,
        *,
        is_durable: bool,
        every: Every | None = None,
        begun_step: int = 0,
    ) -> None:
        """`every`: interval of copies that no call asked for; None: always."""
        self.tier, self.every = tier, every
        self._queue = UploadQueue(every, begun_step, time.monotonic())
        self.newest: str | None = None
        self.busy: str | None = None
        self.seconds_per_byte: float | None = None
        self.skipped = self.failed = self.written_bytes = self.damaged = 0
        self.created: float | None = None
        self._work, self._is_durable = work, is_durable
        world = work.channel.world
        self._rank, self._size = world.rank, world.size
        self._store = work.channel.scoped(f"flush/{number}")
        self._round = UploadRound(self._store.connection())
        self._changed = threading.Condition()
        self._retry_s, self._retry_after_s = 0.0, FIRST_RETRY_S
        self._draining = self._stopping = self._is_there = False
        self._newest_bytes = 0
        self._last: SnapshotName | None = None  # the newest that was copied
        self._failed: dict[SnapshotName, tuple[SaveFailed, bool]] = {}  # the last try, if it failed
        self._logged = ""
        self._recorded_state = (CLOSED, "")
        self._share_bytes = self._copied_bytes = 0  # of the copy under way
        self._busy_since_s = 0.0
        self._done: set[str] = set()  # copied, of a snapshot that is not committed there yet
        self._mirrored_records: dict[str, bytes] = {}  # records
        self._followed = self._follow_anew()
        run = self._lead if self._rank == 0 else self._follow
        self._thread = threads.thread(run, "trainckpt-flush")

    def start(self) -> None:
        """Start the thread, with the uploads that earlier attempts left."""
        self._thread.start()

    def offer(self, manifest: Manifest, pending: SaveHandle, own_bytes: int) -> None:
        """Queue a snapshot committed in the run directory. Saving thread, every rank.

        Args:
            manifest: The manifest, as far as one rank knows it.
            pending: Handle, resolved when the copy is durable.
            own_bytes: Size of this rank's file.
        """
        name = manifest.name
        with self._changed:
            if (last := self._last) is None or name > last:
                # Rank 0 may have tried before this rank's save had returned.
                why, lost = self._failed.get(name, (None, False))
                if not lost:
                    self._queue.add(name, pending, tagged=bool(manifest.tags))
                if why is not None and self._is_durable:
                    pending.fail_durable(why, for_good=lost)
                self._newest_bytes = own_bytes
                self._retry_s, self._retry_after_s = 0.0, FIRST_RETRY_S
                self._changed.notify_all()
                return
        if self._is_durable:  # so it was copied
            self._resolve(pending, name, last)

    def drain(self, drain: UploadDeadline) -> None:
        """Copy waiting snapshots, each at most once; every rank. Rank 0 decides when it is over."""
        with self._changed:
            self._draining, self._retry_s = True, 0.0
            self._changed.notify_all()
        if self._rank:
            has_forwarded = False
            while not self._store.wait("left", min(drain.left_s(), POLL_S)) and drain.left_s() > 0:
                if not has_forwarded and (asked := drain.asked()) is not None:
                    has_forwarded = True
                    self._store.put(_HURRY, list(asked))
        else:
            signs = ProgressWatchdog(self._store)
            while self._thread.is_alive() and drain.left_s() > 0:
                if signs.is_stuck(time.monotonic()):
                    self._warn("it does not answer")
                    break
                drain.update(signs.forwarded_request())
                self._thread.join(min(drain.left_s(), POLL_S))
            self._store.put("left", True)
            if drain.shortened_by and self._thread.is_alive():
                logger.warning(LEFT_BEHIND, drain.shortened_by, self.tier.name)
        self.stop()

    def predicted_s(self) -> float | None:
        """Return the seconds for the newest waiting snapshot; 0 if none waits, None if unknown."""
        with self._changed:
            waits = bool(self._queue)
        return self.copy_s() if waits else 0.0

    def copy_s(self) -> float | None:
        """Return the seconds for a copy as large as the newest snapshot; None if unknown."""
        per_byte = self.seconds_per_byte
        return None if per_byte is None else per_byte * self._newest_bytes

    def interval_s(self, own_s: float | None, step_s: float | None) -> float | None:
        """Return the seconds from one copy to the next, as `copy_interval_s`. Any thread."""
        return copy_interval_s(self.every, self._queue.last_copy, own_s, step_s)

    def upload_now(self, now_s: float) -> UploadNow:
        """Return what it does. Rank 0, any thread."""
        busy, total = self.busy or "", self._share_bytes
        copied = min(self._copied_bytes, total)
        left_s = None
        if busy and copied:
            left_s = (now_s - self._busy_since_s) * (total - copied) / copied
        elif busy and self.seconds_per_byte is not None:
            left_s = self.seconds_per_byte * total
        return UploadNow(
            tier=self.tier.name,
            newest=self.newest or "",
            snapshot=busy,
            num_bytes=total if busy else 0,
            copied_bytes=copied if busy else 0,
            seconds_left=left_s,
            waiting=len(self._queue),
            skipped=self.skipped,
            failed=self.failed,
            trouble=self._logged,
        )

    def stop(self) -> None:
        """Start no more copies; the current one is abandoned at its next block."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._rank == 0 and self._thread.is_alive():
            self._thread.join(STOPPED_WITHIN_S)

    # ---- the thread of rank 0

    def _lead(self) -> None:
        self._attempt(self._look_back)
        self._record_state()
        while (name := self._next()) is not None:
            self.busy = str(name)
            begun_s = self._busy_since_s = time.monotonic()
            verdict = self._flush(name)
            self.busy = None
            took_s = time.monotonic() - begun_s
            last = self._queue.last_copy
            if "error" not in verdict and (last is None or name.step >= last.step):
                self._queue.last_copy = LastCopy(name.step, begun_s, took_s)
            self._handle_verdict(name, verdict, took_s)
            self._record_state()
        if not self._stopping:
            self._attempt(self._mirror)
        self._attempt(self._round.end)

    def _attempt(self, call: Callable[[], object]) -> None:
        # What fails is found again at the next upload.
        try:
            call()
        except TrainckptError as error:
            self._warn(error.message)

    def _record_state(self) -> None:
        health = health_of(self.tier)
        now = (CLOSED if health is None else health.state, self._logged)
        if now != self._recorded_state:
            self._recorded_state = now
            trouble = {"breaker": now[0], "lags": now[1], "since": time.time()}
            self._work.record_writer.set_fact(TROUBLE, self.tier.name, trouble)

    def _look_back(self) -> None:
        """Queue snapshots of earlier attempts that the tier lacks."""
        run_tier, run = self._work.run_tier, self._work.run
        records = read_attempts(run_tier)
        candidates = catalog.read_catalog(run_tier, run, records)
        usable = [c for c in candidates if c.usable and c.name.attempt < self._work.number.value]
        recorded = set(newest_commits(records).get(self.tier.name, {}).values())
        known = [c for c in usable if str(c.name) in recorded]
        self._take_as_newest(next(iter(known), None))
        self._be_there()  # a tier that does not answer has what is known of it
        tagged = [c for c in usable[1:] if c.manifest is not None and c.manifest.tags]
        wanted = [*usable[:1], *tagged]
        lacking = [c for c in wanted if not tier_copy.holds(self.tier, c.name)]

        def is_there(candidate: Candidate) -> bool:
            if candidate in wanted:
                return candidate not in lacking
            return candidate in known and tier_copy.holds(self.tier, candidate.name)

        self._take_as_newest(next(filter(is_there, usable), None))
        with self._changed:
            for candidate in lacking:
                tags = candidate.manifest.tags if candidate.manifest is not None else ()
                self._queue.add_earlier(candidate.name, tagged=bool(tags))

    def _take_as_newest(self, candidate: Candidate | None) -> None:
        """Take an earlier attempt's snapshot as the newest there; None: none is known."""
        manifest = None if candidate is None else candidate.manifest
        self.newest = None if candidate is None else str(candidate.name)
        self.created = None if manifest is None else manifest.created

    def _next(self) -> SnapshotName | None:
        with self._changed:
            while not self._stopping:
                now_s = time.monotonic()
                waiting, wait_s = self._queue.next(now_s, all_at_once=self._draining)
                wait_s = max(wait_s, self._retry_s - now_s)
                if waiting is not None and wait_s <= 0:
                    return waiting
                if self._draining:
                    return None
                self._changed.wait(wait_s if waiting is not None and wait_s < DAY_S else None)
            return None

    def _flush(self, name: SnapshotName) -> dict[str, Any]:
        """Try one upload; return the verdict for all ranks."""
        order: dict[str, Any] = {"snapshot": str(name)}
        try:
            manifest, data, order["there"] = self._look(name)
        except Exception as error:  # noqa: BLE001 - handles of other ranks are waited for too
            order["failed"] = failure(error, 0)
        try:
            self._round.publish_order(order)
            reports = [self._part(order), *self._round.gather_reports()]
            bad = [report for report in reports if "error" in report]
            if bad:
                why = "; ".join(report["error"] for report in bad)
                verdict = {"error": why, "lost": any(report["lost"] for report in bad)}
            else:
                self._commit(manifest, data)
                verdict = {"bytes": manifest.num_bytes}
        except Exception as error:  # noqa: BLE001 - the other ranks wait, and training goes on
            anew = isinstance(error, SaveFailed)
            self._followed = self._follow_anew()  # files there may have vanished
            verdict = {**failure(error, 0), "lost": False, "anew": anew}
        self._attempt(lambda: self._round.publish_verdict(verdict))
        return verdict

    def _look(self, name: SnapshotName) -> tuple[Manifest, bytes, list[str]]:
        """Return the manifest, its bytes, and the reached older files that the tier has."""
        key = f"{name.folder}/{MANIFEST}"
        data = self._work.run_tier.read(key, max_bytes=manifests.MAX_BYTES)
        manifest = manifests.load(data, key)
        try:
            self._be_there()
            tier_copy.must_not_be_another(self.tier, manifest)
            there = self._complete_keys() if manifest.reached else ()
        except UnusableSnapshot as error:  # a record: the snapshot is not lost by that
            raise TierUnavailable(error.message, hint=error.hint) from error
        return manifest, data, tier_copy.all_reached(manifest, there)

    def _follow_anew(self) -> FollowedRun:
        return FollowedRun(self.tier, self._work.run_tier, self._work.run)

    def _complete_keys(self) -> set[str]:
        """Return the keys of complete files in the tier: those of committed snapshots."""
        self._followed.candidates(self._followed.attempts(self._work.number.value))
        return self._followed.files()

    def _be_there(self) -> None:
        run_tier = self._work.run_tier
        tier_copy.found_there(run_tier, self.tier, self._work.run, again=self._is_there)
        self._is_there = True
        self._mirror(self._work.number.value)

    def _mirror(self, live: int = 0) -> None:
        tier_copy.mirror_records(self._work.run_tier, self.tier, self._mirrored_records, live)

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        tier_copy.commit_copy(self.tier, manifest, data)
        self.newest, self.created = str(manifest.name), manifest.created
        self._work.record_writer.set_fact(COMMITS, self.tier.name, self.newest)
        try:
            self._prune()
        except TrainckptError as error:
            logger.warning("could not prune %s: %s", self.tier.url, error.message)

    def _prune(self) -> None:
        """Prune by the policy of the run directory; a newer attempt decides by itself."""
        work = self._work

        def is_superseded() -> bool:
            return newest(work.run_tier) > work.number.value

        if not is_superseded():
            prune.prune_by_policy(
                self._followed,
                self._followed.attempts(work.number.value),
                keep_last=work.keep_last,
                attempt=work.number.value,
                unless=is_superseded,
            )

    # ---- the thread of every other rank

    def _follow(self) -> None:
        # background thread: no collectives here, only the store
        try:
            while (order := self._round.next_order()) is not None:
                verdict = self._round.report(self._part(order))
                name = SnapshotName.parse(order["snapshot"])
                assert name is not None
                self._handle_verdict(name, verdict, 0.0)
        except TrainckptError:
            return  # the store is gone, and with it the run

    # ---- both

    def _part(self, order: dict[str, Any]) -> dict[str, Any]:
        if "failed" in order:
            return order["failed"] if self._rank == 0 else {"ok": True}
        work = self._work
        try:
            name = SnapshotName.parse(order["snapshot"])
            assert name is not None
            manifest = catalog.load_manifest(work.run_tier, work.run, name)
            there = {*order["there"], *self._done}
            share = tier_copy.share(manifest, self._rank, self._size)
            self._share_bytes = sum(f.num_bytes for key, f in share if key not in there)
            self._copied_bytes = 0
            for key, file in share:
                if key not in there:
                    sources = (work.arena_first, work.run_tier)
                    check = self._check_progress
                    with self._round.copying():
                        tier_copy.copy_missing(
                            sources, self.tier, manifest, key=key, file=file, check=check
                        )
                    self._done.add(key)
        except Exception as error:  # noqa: BLE001 - it is reported, and training goes on
            return failure(error, self._rank)
        return {"ok": True}

    def _check_progress(self, num_bytes: int) -> None:
        if self._stopping:
            raise UploadAbandoned("this rank is leaving")
        self._copied_bytes += num_bytes
        self._round.report_progress(num_bytes)

    def _handle_verdict(self, name: SnapshotName, verdict: dict[str, Any], took_s: float) -> None:
        """Handle the end of one try, in the same way on all ranks."""
        error = verdict.get("error")
        if error is None:
            self._logged, self._retry_s, self._retry_after_s = "", 0.0, FIRST_RETRY_S
            self._done.clear()
            if self._rank == 0:
                self.seconds_per_byte = took_s / max(verdict["bytes"] / self._size, 1)
                self.written_bytes += verdict["bytes"]
                logger.debug("%s is in %s", name, self.tier.name)
                self._work.record_writer.saves.note_arrival(str(name), self.tier.name)
            self._arrived(name)
            return
        lost = bool(verdict.get("lost"))
        self.failed += 1
        self.damaged += lost
        if self._rank == 0 and not self._stopping:
            saves = self._work.record_writer.saves
            saves.note_not_kept(str(name), NOT_COPIED, str(error), self.tier.name)
        if verdict.get("anew"):  # something of it was taken away
            self._done.clear()
        if lost and self._rank == 0:
            logger.warning("gave up copying %s to %s: %s", name, self.tier.name, error)
        elif not self._stopping:
            self._warn(f"{name}: {error}")
        why = SaveFailed(f"could not copy {name} to {self.tier.name}: {error}")
        with self._changed:
            self._failed = {name: (why, lost)}
            self._retry_s = time.monotonic() + self._retry_after_s
            self._retry_after_s = min(2 * self._retry_after_s, MOST_RETRY_S)
            pending = self._queue.handle(name)
            behind = [] if lost else self._queue.older_handles(name)
            if lost:
                self._queue.remove(name)
                self._retry_s = 0.0
        if pending is not None and self._is_durable:
            pending.fail_durable(why, for_good=lost)
        for handle in behind if self._is_durable else ():  # they may not have their turn for long
            handle.fail_durable(why)

    def _arrived(self, name: SnapshotName) -> None:
        with self._changed:
            self._last = name if self._last is None else max(name, self._last)
            over = self._queue.superseded_by(name)
            pending = {each: self._queue.remove(each) for each in over}
            self.skipped += sum(each != name for each in over)
        for each, handle in pending.items():
            if handle is not None and self._is_durable:
                self._resolve(handle, each, name)

    def _resolve(self, pending: SaveHandle, name: SnapshotName, copied: SnapshotName) -> None:
        if name == copied:
            pending.reach(DURABLE)
            return
        why = f"{name} was skipped: the newer {copied} was copied to {self.tier.name} first"
        pending.fail_durable(SaveFailed(why), for_good=True)

    def _warn(self, why: str) -> None:
        """Log a reason once, until another copy succeeds."""
        if self._rank == 0 and not self._logged:
            self._logged = why
            logger.warning("copying to tier %s failed, will retry: %s", self.tier.name, why)
