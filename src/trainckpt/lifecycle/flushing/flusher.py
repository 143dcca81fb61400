"""The flusher: one rank's part in copying this attempt's snapshots to one slower tier.

    rank 0         takes the newest snapshot that the tier lacks, and says which (an order)
    every rank     copies its share, reports
    rank 0         commits there, prunes there, tells all (a verdict)

On a thread of its own, over keys of its own: training never waits for it, and a tier that hangs
holds up no other. The newest goes first; once it is there, older ones are left out, but those with
a tag. A tier with an interval of its own gets less (`flush_queue`). What fails is tried again: with
the next snapshot, or after a while.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.lifecycle.deciding.tier_interval import LastCopy
from trainckpt.lifecycle.flushing.drain import LOOK_S
from trainckpt.lifecycle.flushing.flush_queue import Queue
from trainckpt.lifecycle.flushing.orders import Orders, Signs, await_end, failure
from trainckpt.lifecycle.flushing.tidy import Tidy
from trainckpt.lifecycle.places.slower import COMMITS, TROUBLE
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.pending import DURABLE
from trainckpt.ranks import talking
from trainckpt.ranks.channel import DAY_S
from trainckpt.snapshot import catalog, flush
from trainckpt.snapshot.attempts import read_attempts
from trainckpt.tiers.breaker import CLOSED
from trainckpt.tiers.places import health_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.flushing.drain import Drain
    from trainckpt.lifecycle.flushing.flush_work import Work
    from trainckpt.lifecycle.run.options import Every
    from trainckpt.lifecycle.run.pending import PendingSave
    from trainckpt.tiers.base import Tier

FIRST_RETRY_S, MOST_RETRY_S = 15.0, 600.0
STOPPED_WITHIN_S = 2.0
LEFT_BEHIND = (
    "%s: leaving; the next start of the run, or `trainckpt flush` copies to %s what it lacks"
)


class GivenUp(Exception):
    """This rank leaves."""


class Flusher:
    """Copies snapshots to one tier.

    Attributes:
        tier: The slower tier.
        newest: Full name of the newest snapshot that was committed there, as far as is known.
        busy: Full name of the one that is being copied.
        seconds_per_byte: Of one rank's files, as the last flush went; None before the first.
        skipped, failed: How many were left out for newer ones; how many tries have failed.
    """

    def __init__(
        self,
        tier: Tier,
        work: Work,
        number: int,
        *,
        is_durable: bool,
        every: Every | None = None,
        begun_step: int = 0,
    ) -> None:
        """`every`: how often a snapshot that nobody asked for is copied; None: always."""
        self.tier = tier
        self._queue = Queue(every, begun_step, time.monotonic())
        self.newest: str | None = None
        self.busy: str | None = None
        self.seconds_per_byte: float | None = None
        self.skipped = self.failed = 0
        self._work, self._is_durable = work, is_durable
        self._tidy = Tidy(tier, work)
        world = work.channel.world
        self._rank, self._size = world.rank, world.size
        self._left = work.channel.scoped(f"flush/{number}")
        self._orders = Orders(self._left.connection())
        self._changed = threading.Condition()
        self._retry_s, self._retry_after_s = 0.0, FIRST_RETRY_S
        self._draining = self._stopping = self._is_there = False
        self._newest_bytes = 0
        self._last: SnapshotName | None = None  # the newest that was copied
        self._failed: dict[SnapshotName, tuple[SaveFailed, bool]] = {}  # the last try, if it has
        self._said = ""
        self._noted = (CLOSED, "")
        self._done: set[str] = set()  # copied, of a snapshot that is not committed there yet
        self._sent: dict[str, bytes] = {}  # records
        run = self._lead if self._rank == 0 else self._follow
        self._thread = talking.thread(run, "trainckpt-flush")

    def start(self) -> None:
        """Begin with what earlier attempts have left to do."""
        self._thread.start()

    def offer(self, manifest: Manifest, pending: PendingSave, own_bytes: int) -> None:
        """A snapshot is committed in the run's place. Saving thread, every rank.

        Args:
            manifest: As far as one rank knows it.
            pending: Is moved on when it is durable.
            own_bytes: Of this rank's file.
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
            self._settle(pending, name, last)

    def drain(self, drain: Drain) -> None:
        """Copy what waits, but try nothing twice; every rank. Rank 0 decides when it is over."""
        with self._changed:
            self._draining, self._retry_s = True, 0.0
            self._changed.notify_all()
        if self._rank:
            await_end(self._left, drain)
        else:
            signs = Signs(self._left)
            while self._thread.is_alive() and drain.left_s() > 0:
                if signs.stop_at(time.monotonic()):
                    self._warn("it hangs")
                    break
                drain.look(signs.hurry())
                self._thread.join(min(drain.left_s(), LOOK_S))
            self._left.put("left", True)
            if drain.hurried and self._thread.is_alive():
                logger.warning(LEFT_BEHIND, drain.hurried, self.tier.name)
        self.stop()

    def predicted_s(self) -> float | None:
        """How long the newest snapshot that waits will take; 0 if none does, None if not known."""
        with self._changed:
            waits = bool(self._queue)
        return self.copy_s() if waits else 0.0

    def copy_s(self) -> float | None:
        """How long a copy as large as the newest snapshot takes; None if that is not known."""
        per_byte = self.seconds_per_byte
        return None if per_byte is None else per_byte * self._newest_bytes

    def stop(self) -> None:
        """Begin nothing more; what is being copied is given up at its next block."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._rank == 0 and self._thread.is_alive():
            self._thread.join(STOPPED_WITHIN_S)

    # ---- the thread of rank 0

    def _lead(self) -> None:
        self._attempt(self._look_back)
        self._note_trouble()
        while (name := self._next()) is not None:
            self.busy = str(name)
            begun_s = time.monotonic()
            verdict = self._flush(name)
            self.busy = None
            took_s = time.monotonic() - begun_s
            last = self._queue.last_copy
            if "error" not in verdict and (last is None or name.step >= last.step):
                self._queue.last_copy = LastCopy(name.step, begun_s, took_s)
            self._told(name, verdict, took_s)
            self._note_trouble()
        if not self._stopping:
            self._attempt(lambda: flush.mirror_records(self._work.place, self.tier, self._sent))
        self._attempt(self._orders.end)

    def _attempt(self, call: Callable[[], object]) -> None:
        """What fails here is found again when the next snapshot is flushed."""
        try:
            call()
        except TrainckptError as error:
            self._warn(error.message)

    def _note_trouble(self) -> None:
        """For `list` and `doctor`: the record says how calls go, whenever that has changed."""
        health = health_of(self.tier)
        now = (CLOSED if health is None else health.state, self._said)
        if now != self._noted:
            self._noted = now
            told = {"breaker": now[0], "lags": now[1], "since": time.time()}
            self._work.log.note(TROUBLE, self.tier.name, told)

    def _look_back(self) -> None:
        """What the tier lacks of what attempts before this one have committed."""
        self._be_there()
        place, run = self._work.place, self._work.run
        found = catalog.read_catalog(place, run, read_attempts(place))
        usable = [c for c in found if c.usable and c.name.attempt < self._work.attempt]
        tagged = [c for c in usable[1:] if c.manifest is not None and c.manifest.tags]
        lacking = [c for c in (*usable[:1], *tagged) if not flush.holds(self.tier, c.name)]
        if usable and usable[0] not in lacking:
            self.newest = str(usable[0].name)
        with self._changed:
            for candidate in lacking:
                tags = candidate.manifest.tags if candidate.manifest is not None else ()
                self._queue.add_left(candidate.name, tagged=bool(tags))

    def _next(self) -> SnapshotName | None:
        """The snapshot to copy now, once there is one; None: it is over."""
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
        """One try; what all ranks are told."""
        order: dict[str, Any] = {"snapshot": str(name)}
        try:
            manifest, data, order["there"] = self._look(name)
        except Exception as error:  # noqa: BLE001 - handles of other ranks are waited for too
            order["failed"] = failure(error, 0)
        try:
            self._orders.give(order)
            reports = [self._part(order), *self._orders.reports()]
            bad = [report for report in reports if "error" in report]
            if bad:
                why = "; ".join(report["error"] for report in bad)
                verdict = {"error": why, "lost": any(report["lost"] for report in bad)}
            else:
                self._commit(manifest, data)
                verdict = {"bytes": manifest.num_bytes}
        except Exception as error:  # noqa: BLE001 - the other ranks wait, and training goes on
            anew = isinstance(error, SaveFailed)
            verdict = {**failure(error, 0), "lost": False, "anew": anew}
        self._attempt(lambda: self._orders.tell(verdict))
        return verdict

    def _look(self, name: SnapshotName) -> tuple[Manifest, bytes, list[str]]:
        """The manifest, its bytes, and which of the older files it reaches the tier has."""
        key = f"{name.folder}/{MANIFEST}"
        data = self._work.place.read(key, max_bytes=manifests.MAX_BYTES)
        manifest = manifests.load(data, key)
        try:
            self._be_there()
            flush.must_not_be_another(self.tier, manifest)
            there = flush.committed_keys(self.tier, manifest.run) if manifest.reached else ()
        except UnusableSnapshot as error:  # a record: the snapshot is not lost by that
            raise TierUnavailable(error.message, hint=error.hint) from error
        return manifest, data, flush.all_reached(manifest, there)

    def _be_there(self) -> None:
        """The tier holds this run, and its records."""
        place = self._work.place
        flush.found_there(place, self.tier, self._work.run, again=self._is_there)
        self._is_there = True
        flush.mirror_records(place, self.tier, self._sent)

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        flush.commit_copy(self.tier, manifest, data)
        self.newest = str(manifest.name)
        self._work.log.note(COMMITS, self.tier.name, self.newest)
        try:
            self._tidy.prune()
        except TrainckptError as error:
            logger.warning("%s could not be pruned: %s", self.tier.url, error.message)

    # ---- the thread of every other rank

    def _follow(self) -> None:
        # background thread: no collectives here, only the store
        try:
            while (order := self._orders.wait()) is not None:
                verdict = self._orders.report(self._part(order))
                name = SnapshotName.parse(order["snapshot"])
                assert name is not None
                self._told(name, verdict, 0.0)
        except TrainckptError:
            return  # the store is gone, and with it the run

    # ---- both

    def _part(self, order: dict[str, Any]) -> dict[str, Any]:
        """Copy this rank's share; what to report."""
        if "failed" in order:
            return order["failed"] if self._rank == 0 else {"ok": True}
        work = self._work
        try:
            name = SnapshotName.parse(order["snapshot"])
            assert name is not None
            manifest = catalog.load_manifest(work.place, work.run, name)
            there = {*order["there"], *self._done}
            for key, file in flush.share(manifest, self._rank, self._size):
                if key not in there:
                    sources = (work.near, work.place)
                    with self._orders.copying():
                        flush.copy_missing(sources, self.tier, manifest, key, file, self._go_on)
                    self._done.add(key)
        except Exception as error:  # noqa: BLE001 - it is reported, and training goes on
            return failure(error, self._rank)
        return {"ok": True}

    def _go_on(self, num_bytes: int) -> None:
        if self._stopping:
            raise GivenUp("this rank leaves")
        self._orders.sign(num_bytes)

    def _told(self, name: SnapshotName, verdict: dict[str, Any], took_s: float) -> None:
        """One try is over, in the same way on all ranks."""
        error = verdict.get("error")
        if error is None:
            self._said, self._retry_s, self._retry_after_s = "", 0.0, FIRST_RETRY_S
            self._done.clear()
            if self._rank == 0:
                self.seconds_per_byte = took_s / max(verdict["bytes"] / self._size, 1)
                logger.info("%s is in %s", name, self.tier.name)
            self._arrived(name)
            return
        lost = bool(verdict.get("lost"))
        self.failed += 1
        if verdict.get("anew"):  # something of it was taken away
            self._done.clear()
        if lost and self._rank == 0:
            logger.warning("%s is not copied to %s: %s", name, self.tier.name, error)
        elif not self._stopping:
            self._warn(f"{name}: {error}")
        why = SaveFailed(f"{name} could not be copied to {self.tier.name}: {error}")
        with self._changed:
            self._failed = {name: (why, lost)}
            self._retry_s = time.monotonic() + self._retry_after_s
            self._retry_after_s = min(2 * self._retry_after_s, MOST_RETRY_S)
            pending = self._queue.handles.get(name)
            behind = [] if lost else self._queue.behind(name)
            if lost:
                self._queue.forget(name)
                self._retry_s = 0.0
        if pending is not None and self._is_durable:
            pending.fail_durable(why, for_good=lost)
        for handle in behind if self._is_durable else ():  # they may not have their turn for long
            handle.fail_durable(why)

    def _arrived(self, name: SnapshotName) -> None:
        """It is there, and so what is older and has no tag is not needed there any more."""
        with self._changed:
            self._last = name if self._last is None else max(name, self._last)
            over = self._queue.arrived(name)
            pending = {n: self._queue.handles.get(n) for n in over}
            for each in over:
                self._queue.forget(each)
            self.skipped += sum(each != name for each in over)
        for each, handle in pending.items():
            if handle is not None and self._is_durable:
                self._settle(handle, each, name)

    def _settle(self, pending: PendingSave, name: SnapshotName, copied: SnapshotName) -> None:
        if name == copied:
            pending.reach(DURABLE)
            return
        why = f"{name} was left out: {copied} is newer, and was copied to {self.tier.name} first"
        pending.fail_durable(SaveFailed(why), for_good=True)

    def _warn(self, why: str) -> None:
        """Said once, until something was copied again."""
        if self._rank == 0 and not self._said:
            self._said = why
            logger.warning(
                "the tier %s lags behind, training goes on and it is tried again: %s",
                self.tier.name, why,
            )  # fmt: skip
