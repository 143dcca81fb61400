"""The save an attempt ends with: taken if it is needed and fits into what is left.

All ranks bring what they can do, and read one answer from it:

    a save in flight did not end in time      nothing is started: its writing thread is busy
    the newest commit is of this very place   nothing to do, unless a save was asked for
    it would miss the deadline                to memory, where that fits and outlives the cause
                                              (`stop_tier`); else not started, the older one stands
    else                                      taken, and waited for until the deadline
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.lifecycle.deciding import stop_tier
from trainckpt.lifecycle.deciding.flush_plan import UNLIMITED_S
from trainckpt.lifecycle.deciding.stop_plan import Offer, why_not_save
from trainckpt.lifecycle.deciding.stop_tier import MEMORY, PARTNER
from trainckpt.lifecycle.flushing.drain import Drain
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.options import LOCAL
from trainckpt.lifecycle.run.pending import PendingSave
from trainckpt.lifecycle.saving.requests import merged, tags_of
from trainckpt.state.stage import TensorsChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.deciding.outlook import Outlook
    from trainckpt.lifecycle.saving.requests import Asked, Requests
    from trainckpt.lifecycle.saving.saver import Saver
    from trainckpt.lifecycle.stopping.deadline import Deadline
    from trainckpt.ranks.channel import Channel


RANKS_TIMEOUT_S = 600.0
LOOK_AGAIN_S = 0.25
LEAVE_S = 0.2  # of what is left, for the record and the way out
TIDY_WITHIN_S = 5.0  # a deadline is not met for the sake of what is to be pruned
IN_FLIGHT = "the save before it was still being written"


class LastSave:
    """Takes it, once for each stop.

    Attributes:
        parent: Full name and cursor of the snapshot this attempt began from.
        skipped: What was not saved and why, for the attempt's record; None if nothing was.
        chosen: Where the save of a stop was to go and why, for the record; None if none was taken.
        goes_here: Whether this very host was told that it is taken away.
    """

    def __init__(
        self, channel: Channel, saver: Saver, outlook: Outlook, requests: Requests, *,
        on_one_host: bool = False,
    ) -> None:  # fmt: skip
        """`on_one_host`: the run's place is lost with this machine."""
        self._on_one_host = on_one_host
        self.goes_here: Callable[[], bool] = lambda: False
        self.parent: tuple[str, Cursor] | None = None
        self.skipped: dict[str, Any] | None = None
        self.chosen: dict[str, Any] | None = None
        self._kept: tuple[str, Cursor] | None = None  # in memory alone
        self._channel = channel
        self._saver = saver
        self._outlook, self._requests = outlook, requests

    def wait(self, limit_s: float) -> None:
        """Return when no save is in flight, or after `limit_s` seconds."""
        self._saver.join(limit_s)

    def release_memory(self, *, keep: bool) -> None:
        """The attempt is over; `keep` what is in shared memory for the next one."""
        self._saver.close(keep=keep)

    def flush(self, reason: str, deadline: Deadline) -> None:
        """At a stop: copy to slower tiers what is not there yet, as far as time allows. Every rank.

        Args:
            reason: Of the stop.
            deadline: To keep.
        """
        limit_s = UNLIMITED_S
        if self._channel.world.rank == 0:  # it decides for all
            limit_s = self._may_flush_s(reason, _within(deadline))
        self._saver.flushing.leave(Drain(limit_s))

    def flush_all(self, asked: Callable[[], tuple[str, float | None] | None]) -> None:
        """The run is finished, and this is what is left to do. Every rank; as long as nobody asks
        it to leave: then as at a stop."""
        self._saver.flushing.leave(Drain(UNLIMITED_S, asked, self._may_flush_s))

    def _may_flush_s(self, reason: str, left_s: float | None) -> float:
        on_this_host = self._on_one_host
        return self._saver.flushing.limit_s(reason, left_s, on_this_host=on_this_host)

    def give_up_flushing(self) -> None:
        """Leave what is being copied."""
        self._saver.flushing.give_up()

    def holding(self, snapshot: str | None) -> list[str]:
        """Names of the tiers that hold the snapshot."""
        if self._kept is not None and self._kept[0] == snapshot and self.chosen is not None:
            return [self.chosen["tier"]]
        return self._saver.flushing.holding(snapshot)

    def standing(self, cursor: Cursor) -> tuple[str | None, int]:
        """Newest snapshot to go on from, and how many micro-batches it lies back."""
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
        """Every rank calls it at the same boundary. Returns why there is no snapshot of it.

        `stops`: the run goes on later, so the save may stay where the next attempt finds it.
        """
        failure = self._take_or_skip(_End(cursor, reason, deadline, stops=stops))
        left_s = _within(deadline)
        self._saver.join(left_s)
        self._saver.tidy(TIDY_WITHIN_S if left_s is None else min(left_s, TIDY_WITHIN_S))
        return failure

    def _take_or_skip(self, end: _End) -> SaveFailed | None:
        self._saver.protecting.give_way()
        self._wait(end.deadline)
        in_flight = self._saver.busy
        snapshot, lost = self.standing(end.cursor)
        left_s = _within(end.deadline)
        offer = Offer(left_s, self._outlook.save_s(), fallback=snapshot is not None)
        mine = {"stands": bool(snapshot) and not lost, "in_flight": in_flight, **vars(offer)}
        mine["asked"] = self._requests.waiting()
        mine |= self._means(end.reason) if end.stops and not in_flight else {}
        try:
            everyone = self._channel.gather("last save", mine, _limit(left_s))
        except NoAgreement as error:
            return self._skip(end, offer, f"not all ranks got here in time: {error.message}")
        asked = merged(each["asked"] for each in everyone)
        stands = everyone[0]["stands"]  # it commits, so its word counts
        if stands and not asked:
            return None
        end = replace(end, stands=stands, tags=tags_of(asked))
        failure = self._take_agreed(end, offer, mine, everyone)
        self._settle(asked, failure)
        return None if stands else failure

    def _take_agreed(
        self, end: _End, offer: Offer, mine: dict[str, Any], everyone: Sequence[dict[str, Any]]
    ) -> SaveFailed | None:
        """All ranks alike, from what everyone can do. What stands is not taken to memory again."""
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
                return self._skip(end, offer, f"not all ranks got on in time: {error.message}")
            why = _in_flight(everyone)
        why = why or why_not_save([_offer(other) for other in everyone])
        if why:
            return self._skip(end, offer, why)
        pending = self._take(end)
        if isinstance(pending.error, TensorsChanged):
            logger.warning("%s: taken again, copied first", pending.error.message)
            pending = self._take(end, copied=True)
        if not pending.ended:
            return self._skip(end, offer, "it was not committed when the time was over")
        return pending.error

    def _settle(self, asked: Sequence[Asked], failure: SaveFailed | None) -> None:
        """What had been asked for before became this save, or nothing did."""
        says, kept = self._channel.world.rank == 0, self._kept
        if failure is not None:
            self._requests.give_up(asked, failure.message, says=says)
        elif kept is not None and self.chosen is not None:  # with its tags: nobody need be warned
            why = f"{kept[0]} is in {self.chosen['tier']}, and is committed by whoever comes next"
            self._requests.give_up(asked, why, says=False)
        elif self._saver.in_flight is not None:
            self._requests.taken(asked, self._saver.in_flight)

    def _means(self, reason: str) -> dict[str, Any]:
        """What this rank can do besides saving to the run's place."""
        saver = self._saver
        ready = saver.arenas.are_ready and saver.arenas.outlive_supervisor
        memory_s = self._outlook.memory_s() if ready and saver.has_room else None
        others_s = saver.protecting.seconds
        both = (memory_s, others_s)
        machine_goes = stop_tier.takes_machine(reason, os.environ)
        return {
            "memory_s": memory_s,
            "partner_s": None if None in both else sum(s for s in both if s is not None),
            "machine_goes": machine_goes,
            "leaving": self._channel.world.host if self.goes_here() else "",
            "num_losses": saver.protecting.num_losses,
            "place_goes": bool(machine_goes) and self._on_one_host,
            "slower": saver.flushing.predicted(),
        }

    def _choose(self, everyone: Sequence[dict[str, Any]]) -> str:
        """The tier, the same on all ranks: said, and kept for the record."""
        lefts = [each["left_s"] for each in everyone if each["left_s"] is not None]
        left_s, first = min(lefts, default=None), everyone[0]
        choice = stop_tier.choose_tier(first["machine_goes"], left_s, stop_tier.ways_of(everyone))
        self.chosen = choice.to_json(left_s)
        if self._channel.world.rank == 0 and (left_s is not None or first["machine_goes"]):
            took = "" if choice.predicted_s is None else f", in about {choice.predicted_s:.1f} s"
            logger.info("the last save goes to %s%s: %s", choice.tier, took, choice.why)
        return choice.tier if choice.tier in (MEMORY, PARTNER) else LOCAL

    def _keep(self, end: _End) -> bool:
        """Take it to memory; False: it is not there, on any rank."""
        assert self.chosen is not None
        self._saver.protecting.prepare_last(others=self.chosen["tier"] == PARTNER)
        pending = self._take(end, in_memory=True)
        if pending.error is None and pending.unprotected == "" and pending.snapshot is not None:
            self._kept = pending.snapshot, end.cursor
            return True
        if self._channel.world.rank == 0:
            why = pending.error.message if pending.error else "too late"
            logger.warning("it is not in %s: %s", self.chosen["tier"], why)
        self.chosen["failed"] = True
        return False

    def go_on(self, channel: Channel) -> Channel:
        """The stop was undone, so another last save will come. Returns fresh keys for all ranks."""
        self.skipped = self.chosen = self._kept = None
        self._saver.protecting.take_way()
        self._channel = channel.scoped("went on")
        return self._channel

    def _take(self, end: _End, *, copied: bool = False, in_memory: bool = False) -> PendingSave:
        pending = self._saver.save(
            end.cursor, end.reason, end.tags, PendingSave(), last=not copied, in_memory=in_memory
        )
        try:
            self._wait(end.deadline)
        finally:  # also when an alarm's exception ends the wait: the script may go on and write
            if not pending.ended and pending.unprotected is None:
                self._saver.give_up()
        return pending

    def _wait(self, deadline: Deadline) -> None:
        """Until no save is in flight, or the time is over; the deadline may come nearer."""
        while self._saver.busy:
            left_s = _within(deadline)
            if left_s == 0.0:
                return
            self._saver.join(LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
        self._saver.join()

    def _skip(self, end: _End, offer: Offer, why: str) -> SaveFailed:
        if end.stands:  # all that is not there is a tag of its own
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
class _End:
    """Where and why the attempt ends. `stands`: a snapshot of this place is committed already."""

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


def _offer(told: dict[str, Any]) -> Offer:
    return Offer(told["left_s"], told["save_s"], told["fallback"])
