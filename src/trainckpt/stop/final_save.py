"""Take the final save of an attempt, if it is needed and fits into the time left.

All ranks exchange their abilities, and compute one answer from them:

    a save in flight did not end in time      nothing is started: its writing thread is busy
    the newest commit is of this very place   nothing to do, unless a save was asked for
    it would miss the deadline                to memory, if it fits and survives the cause
                                              (`final_save_tier`); else not started: the
                                              older one stands
    else                                      taken, and awaited until the deadline
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import LOCAL
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.attempt.stop_plan import StopPlan, why_not_save
from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.replicate.uploads import UNLIMITED_S, UploadDeadline
from trainckpt.save.requests import merged, tags_of
from trainckpt.state.staging import TensorsChanged
from trainckpt.stop import final_save_tier
from trainckpt.stop.final_save_tier import MEMORY, PARTNER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.estimates import SaveEstimator
    from trainckpt.save.requests import Asked, SaveRequests
    from trainckpt.stop.deadline import Deadline


RANKS_TIMEOUT_S = 600.0
LOOK_AGAIN_S = 0.25
LEAVE_S = 0.2  # of the time left, for the record and the exit
TIDY_WITHIN_S = 5.0  # pruning must not miss a deadline
IN_FLIGHT = "the previous save was still being written"


class FinalSave:
    """Take the final save, once for each stop.

    Attributes:
        parent: Full name and cursor of the snapshot this attempt began from; None: step 0.
        skipped: The part not saved and the reason, for the attempt's record; None if nothing.
        chosen: Target of a stop's save and the reason, for the record; None if none was taken.
    """

    def __init__(
        self,
        *,
        channel: RankStore,
        saver: SaveCoordinator,
        estimator: SaveEstimator,
        requests: SaveRequests,
        parent: tuple[str, Cursor] | None = None,
        host_goes: Callable[[], bool] = lambda: False,
        on_one_host: bool = False,
    ) -> None:
        """Store the arguments.

        Args:
            channel, saver, estimator, requests: Of the attempt.
            parent: Full name and cursor of the snapshot this attempt began from.
            host_goes: Returns True if this very host was announced to be taken away.
            on_one_host: The run directory is lost with this machine.
        """
        self._on_one_host = on_one_host
        self._host_goes = host_goes
        self.parent = parent
        self.skipped: dict[str, Any] | None = None
        self.chosen: dict[str, Any] | None = None
        self._kept: tuple[str, Cursor] | None = None  # in memory alone
        self._channel = channel
        self._saver = saver
        self._estimator, self._requests = estimator, requests

    def wait(self, limit_s: float) -> None:
        """Return when no save is in flight, or after `limit_s` seconds."""
        self._saver.join(limit_s)

    def release_memory(self, *, keep: bool) -> None:
        """Release shared memory at the attempt's end; `keep` leaves its snapshots for the next
        one."""
        self._saver.close(keep=keep)

    def flush(self, reason: str, deadline: Deadline) -> None:
        """Copy missing snapshots to slower tiers at a stop, as far as time allows. Every rank.

        Args:
            reason: Reason of the stop.
            deadline: Deadline of the stop.
        """
        limit_s = UNLIMITED_S
        if self._channel.world.rank == 0:  # it decides for all
            limit_s = self._may_flush_s(reason, _within(deadline))
        self._saver.uploads.drain(UploadDeadline(limit_s))

    def flush_all(self, asked: Callable[[], tuple[str, float | None] | None]) -> None:
        """Upload the rest after the run has finished. Every rank; a notice to leave limits the
        time as at a stop."""
        self._saver.uploads.drain(UploadDeadline(UNLIMITED_S, asked, self._may_flush_s))

    def _may_flush_s(self, reason: str, left_s: float | None) -> float:
        on_this_host = self._on_one_host
        return self._saver.uploads.limit_s(reason, left_s, on_this_host=on_this_host)

    def give_up_flushing(self) -> None:
        """Abandon the uploads under way."""
        self._saver.uploads.abandon()

    def holding(self, snapshot: str | None) -> list[str]:
        """Return the names of the tiers that hold the snapshot."""
        if self._kept is not None and self._kept[0] == snapshot and self.chosen is not None:
            return [self.chosen["tier"]]
        return self._saver.uploads.tiers_with(snapshot)

    def standing(self, cursor: Cursor) -> tuple[str | None, int]:
        """Return the newest snapshot to resume from, and the micro-batches since it."""
        newest = self._kept or self._saver.committed or self.parent
        if newest is None:
            return None, cursor.micro_batches
        name, at = newest
        return name, 0 if at.place() == cursor.place() else max(
            1, cursor.micro_batches - at.micro_batches
        )

    def take(
        self, cursor: Cursor, reason: str, deadline: Deadline, *, stops: bool = False
    ) -> SaveFailed | None:
        """Take the save, or return the failure. Every rank calls it at the same boundary.

        `stops`: the run goes on later, so the save may stay where the next attempt finds it.
        """
        failure = self._take_or_skip(_FinalOutcome(cursor, reason, deadline, stops=stops))
        left_s = _within(deadline)
        self._saver.join(left_s)
        self._saver.wait_for_retention(
            TIDY_WITHIN_S if left_s is None else min(left_s, TIDY_WITHIN_S)
        )
        return failure

    def _take_or_skip(self, end: _FinalOutcome) -> SaveFailed | None:
        self._saver.replication.pause()
        self._wait(end.deadline)
        in_flight = self._saver.busy
        snapshot, lost = self.standing(end.cursor)
        left_s = _within(end.deadline)
        offer = StopPlan(left_s, self._estimator.save_s(), fallback=snapshot is not None)
        mine = {"stands": bool(snapshot) and not lost, "in_flight": in_flight, **vars(offer)}
        mine["asked"] = self._requests.waiting()
        mine |= self._means(end.reason) if end.stops and not in_flight else {}
        try:
            everyone = self._channel.gather("last save", mine, _limit(left_s))
        except NoAgreement as error:
            return self._skip(
                end, offer, f"not all ranks reached the stop in time: {error.message}"
            )
        asked = merged(each["asked"] for each in everyone)
        stands = everyone[0]["stands"]  # rank 0 commits, so its value counts
        if stands and not asked:
            return None
        end = replace(end, stands=stands, tags=tags_of(asked))
        failure = self._take_agreed(end, offer, mine, everyone)
        self._settle(asked, failure)
        return None if stands else failure

    def _take_agreed(
        self,
        end: _FinalOutcome,
        offer: StopPlan,
        mine: dict[str, Any],
        everyone: Sequence[dict[str, Any]],
    ) -> SaveFailed | None:
        """Act on everyone's abilities, alike on all ranks. A committed place is not saved to
        memory again."""
        why = _in_flight(everyone)
        stays = not why and end.stops and not end.stands and self._choose(everyone) != LOCAL
        if stays:
            if self._keep(end):
                return None
            left_s = _within(end.deadline)
            mine |= {"left_s": left_s, "in_flight": self._saver.busy}
            try:
                everyone = self._channel.gather("not kept", mine, _limit(left_s))
            except NoAgreement as error:
                return self._skip(end, offer, f"not all ranks answered in time: {error.message}")
            why = _in_flight(everyone)
        why = why or why_not_save([_offer(other) for other in everyone])
        if why:
            return self._skip(end, offer, why)
        pending = self._take(end)
        if isinstance(pending.error, TensorsChanged):
            logger.warning("final save failed, retrying from a copy: %s", pending.error.message)
            pending = self._take(end, copied=True)
        if not pending.ended:
            return self._skip(end, offer, "it was not committed before the deadline")
        return pending.error

    def _settle(self, asked: Sequence[Asked], failure: SaveFailed | None) -> None:
        """Resolve the pending save requests: with this save, or as failed."""
        says, kept = self._channel.world.rank == 0, self._kept
        if failure is not None:
            self._requests.fail_all(asked, failure.message, says=says)
        elif kept is not None and self.chosen is not None:  # with its tags: no warning needed
            why = f"{kept[0]} is only in {self.chosen['tier']} yet; the next attempt will commit it"
            self._requests.fail_all(asked, why, says=False)
        elif self._saver.in_flight is not None:
            self._requests.resolve(asked, self._saver.in_flight)

    def _means(self, reason: str) -> dict[str, Any]:
        """Return this rank's abilities besides a save to the run directory."""
        saver = self._saver
        ready = saver.arenas.are_ready and saver.arenas.outlive_process
        memory_s = self._estimator.memory_s() if ready and saver.has_room else None
        others_s = saver.replication.seconds
        both = (memory_s, others_s)
        machine_goes = final_save_tier.takes_machine(reason, os.environ)
        return {
            "memory_s": memory_s,
            "partner_s": None if None in both else sum(s for s in both if s is not None),
            "machine_goes": machine_goes,
            "leaving": self._channel.world.host if self._host_goes() else "",
            "num_losses": saver.replication.num_losses,
            "place_goes": bool(machine_goes) and self._on_one_host,
            "slower": saver.uploads.predicted(),
        }

    def _choose(self, everyone: Sequence[dict[str, Any]]) -> str:
        """Choose the tier, the same on all ranks; log it, and keep it for the record."""
        lefts = [each["left_s"] for each in everyone if each["left_s"] is not None]
        left_s, first = min(lefts, default=None), everyone[0]
        choice = final_save_tier.choose_tier(
            first["machine_goes"], left_s, final_save_tier.tier_options(everyone)
        )
        self.chosen = choice.to_json(left_s)
        if self._channel.world.rank == 0 and (left_s is not None or first["machine_goes"]):
            took = "" if choice.predicted_s is None else f", in about {choice.predicted_s:.1f} s"
            logger.info("final save goes to %s%s: %s", choice.tier, took, choice.why)
        return choice.tier if choice.tier in (MEMORY, PARTNER) else LOCAL

    def _keep(self, end: _FinalOutcome) -> bool:
        """Take it to memory; False: it is not there, on any rank."""
        assert self.chosen is not None
        self._saver.replication.prepare_last(others=self.chosen["tier"] == PARTNER)
        pending = self._take(end, in_memory=True)
        if (
            pending.error is None
            and pending.why_not_replicated == ""
            and pending.snapshot is not None
        ):
            self._kept = pending.snapshot, end.cursor
            return True
        if self._channel.world.rank == 0:
            why = pending.error.message if pending.error else "the deadline has passed"
            logger.warning("final save did not reach %s: %s", self.chosen["tier"], why)
        self.chosen["failed"] = True
        return False

    def go_on(self, channel: RankStore) -> RankStore:
        """Prepare for another final save after the stop is undone. Return fresh keys for all
        ranks."""
        self.skipped = self.chosen = self._kept = None
        self._saver.replication.resume()
        self._channel = channel.scoped("went on")
        return self._channel

    def _take(
        self, end: _FinalOutcome, *, copied: bool = False, in_memory: bool = False
    ) -> SaveHandle:
        pending = self._saver.save(
            end.cursor, end.reason, end.tags, SaveHandle(), last=not copied, in_memory=in_memory
        )
        try:
            self._wait(end.deadline)
        finally:  # also when an alarm's exception ends the wait: the script may go on and write
            if not pending.ended and pending.why_not_replicated is None:
                self._saver.abandon()
        return pending

    def _wait(self, deadline: Deadline) -> None:
        """Wait until no save is in flight, or until the deadline, which may move closer."""
        while self._saver.busy:
            left_s = _within(deadline)
            if left_s == 0.0:
                return
            self._saver.join(LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
        self._saver.join()

    def _skip(self, end: _FinalOutcome, offer: StopPlan, why: str) -> SaveFailed:
        if end.stands:  # only the tags are missing
            return SaveFailed(why)
        self.skipped = {
            "cursor": end.cursor.to_json(),
            "why": why,
            "predicted_s": round(offer.save_s, 3),
            "seconds_left": None if offer.left_s is None else round(offer.left_s, 3),
        }
        if self._channel.world.rank == 0:
            logger.warning("no snapshot at %s: %s", end.cursor, why)
        return SaveFailed(f"no snapshot at {end.cursor}: {why}")


@dataclass(frozen=True)
class _FinalOutcome:
    """Place and reason of the attempt's end. `stands`: a snapshot of this place is committed
    already."""

    cursor: Cursor
    reason: str
    deadline: Deadline
    stops: bool
    stands: bool = False
    tags: tuple[str, ...] = ()


def _in_flight(everyone: Sequence[dict[str, Any]]) -> str:
    return IN_FLIGHT if any(each["in_flight"] for each in everyone) else ""


def _within(deadline: Deadline) -> float | None:
    left_s = deadline.left_s()
    return None if left_s is None else max(left_s - LEAVE_S, 0.0)


def _limit(left_s: float | None) -> float:
    return RANKS_TIMEOUT_S if left_s is None else min(left_s, RANKS_TIMEOUT_S)


def _offer(told: dict[str, Any]) -> StopPlan:
    return StopPlan(told["left_s"], told["save_s"], told["fallback"])
