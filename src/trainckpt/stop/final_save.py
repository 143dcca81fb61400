"""Take the final save of an attempt, if it is needed and fits into the time left.

All ranks exchange their abilities, and compute one answer from them:

    a save in flight did not end in time      nothing is started: its writing thread is busy
    the newest commit is of this very place   nothing to do, unless a call waits for a save
    it would miss the deadline                to memory, if it fits and survives the cause; else
                                              not started: the older one stands
    else                                      taken, and awaited until the deadline

`choose_tier` finds the tier, a pure function of the stop's cause and of measurements:

    the processes go    shared memory outlives them, and so does the run directory
    the machine goes    its memory goes with it, and so does a run directory on it alone. Left are a
                        shared one, memory of other hosts (`redundancy`), unless more of them
                        must go than may be lost at once, and slower tiers

The run directory is chosen wherever it outlives the cause and the save fits into the time left;
else the fastest tier that does both. A missing copy there is made after the ranks have left, by
their supervisor (`launcher/finish_uploads.py`) or by the next attempt (`scavenge`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import LOCAL, MEMORY, PARTNER
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.notice import OF_MACHINE
from trainckpt.preemption import kubernetes
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.replicate.uploads import CAUTION, UNLIMITED_S, UploadDeadline
from trainckpt.save.retention import PRUNE_WITHIN_S
from trainckpt.save.schedule import merged, tags_of
from trainckpt.state.staging import TensorsChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.estimates import SaveEstimator
    from trainckpt.save.schedule import Call, SaveRequests
    from trainckpt.stop.deadline import Deadline

AWAY = "the machine is taken away"
SLURM_JOB_VARIABLE = "SLURM_JOB_ID"


@dataclass(frozen=True)
class TierOption:
    """Candidate tier for the final save.

    Attributes:
        tier: Its name.
        outlives_machine: A copy there is not lost with this machine.
        predicted_s: Until the save is there; None: nothing was measured.
    """

    tier: str
    outlives_machine: bool
    predicted_s: float | None

    def fits(self, left_s: float | None) -> bool:
        """Return True if the save arrives in time, as far as is known."""
        return left_s is None or self.predicted_s is None or CAUTION * self.predicted_s <= left_s


def takes_machine(reason: str, environment: Mapping[str, str]) -> str:
    """Return why this machine's memory may be lost at this stop, or "".

    A pod takes its shared memory with it, and a Slurm job may begin again on other nodes.
    """
    if reason.startswith(OF_MACHINE):
        return AWAY
    if kubernetes.in_pod(environment):
        return "the pod takes its memory with it"
    if SLURM_JOB_VARIABLE in environment:
        return "the job may continue on other nodes"
    return ""


def choose_tier(
    machine_goes: str, left_s: float | None, options: Sequence[TierOption]
) -> tuple[TierOption, str]:
    """Return the tier of the final save, and the reason.

    Args:
        machine_goes: Result of `takes_machine`.
        left_s: Until the deadline; None: there is none.
        options: The candidates, the run directory first.
    """
    preferred = options[0]
    safe = [option for option in options if option.outlives_machine or not machine_goes]
    if preferred in safe and left_s is None:
        return preferred, "there is no deadline"
    if preferred in safe and preferred.predicted_s is None:
        return preferred, "no save was measured yet"
    if preferred in safe and preferred.fits(left_s):
        return preferred, f"it fits into the {left_s:.1f} s left"
    fitting = [option for option in safe if option.predicted_s is not None and option.fits(left_s)]
    fastest = min(fitting, key=lambda option: option.predicted_s or 0.0, default=None)
    if fastest is None:
        what = f"{machine_goes}, and nothing" if machine_goes else "nothing"
        more = "" if left_s is None else f" and fits into the {left_s:.1f} s left"
        return preferred, f"{what} else outlives that{more}"
    if machine_goes and not preferred.outlives_machine:
        return fastest, f"{machine_goes}: {preferred.tier} may be lost with it"
    took = f"{preferred.predicted_s:.1f} s" if preferred.predicted_s is not None else "longer"
    return fastest, f"{preferred.tier} would take about {took}, and {left_s:.1f} s are left"


def tier_options(everyone: Sequence[Mapping[str, Any]]) -> list[TierOption]:
    """Return the candidates from all ranks' estimates (`FinalSave`); rank 0 adds the rest."""
    first = everyone[0]
    local_s = max(each["save_s"] for each in everyone) or None
    leaving = {each["leaving"] for each in everyone} - {""}
    others_stay = (
        first["machine_goes"] in ("", AWAY)  # a whole job or its pods go together
        and len(leaving) <= min(each["num_losses"] for each in everyone)
    )
    options = [TierOption(LOCAL, outlives_machine=not first["place_goes"], predicted_s=local_s)]
    for tier, key in ((MEMORY, "memory_s"), (PARTNER, "partner_s")):
        estimates = [each[key] for each in everyone]
        if None not in estimates:
            outlives = tier == PARTNER and others_stay
            options.append(TierOption(tier, outlives_machine=outlives, predicted_s=max(estimates)))
    for name, copy_s in first["slower"]:
        seconds = None if local_s is None or copy_s is None else local_s + copy_s
        options.append(TierOption(name, outlives_machine=True, predicted_s=seconds))
    return options


def why_not_save(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return why the save is not started, or "" to start it. Pure; the same on all ranks.

    Without an older snapshot there is nothing to lose: the save is tried.

    Args:
        everyone: Each rank's `left_s` (until its deadline, or None), `save_s` (predicted) and
            `fallback` (an older snapshot stands).
    """
    lefts = [each["left_s"] for each in everyone if each["left_s"] is not None]
    longest_s = max(each["save_s"] for each in everyone)
    if not lefts or longest_s <= min(lefts) or not any(each["fallback"] for each in everyone):
        return ""
    return f"it would take about {longest_s:.1f} s, and {max(min(lefts), 0.0):.1f} s were left"


# ---- the final save


LOOK_AGAIN_S = 0.25
LEAVE_S = 0.2  # of the time left, for the record and the exit
IN_FLIGHT = "the previous save was still being written"


@dataclass(frozen=True)
class _End:
    """Place and reason of the attempt's end. `stands`: a snapshot of this place is committed
    already."""

    cursor: Cursor
    reason: str
    deadline: Deadline
    stops: bool
    stands: bool = False
    tags: tuple[str, ...] = ()


class FinalSave:
    """Take the final save, once for each stop.

    Attributes:
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
        parent: tuple[str, Cursor] | None,
        host_goes: Callable[[], bool],
        on_one_host: bool,
    ) -> None:
        """Store the arguments.

        Args:
            channel, saver, estimator, requests: Of the attempt.
            parent: Full name and cursor of the snapshot this attempt began from; None: step 0.
            host_goes: Returns True if this very host was announced to be taken away.
            on_one_host: The run directory is lost with this machine.
        """
        self._on_one_host, self._host_goes, self._parent = on_one_host, host_goes, parent
        self._channel, self._saver = channel, saver
        self._estimator, self._requests = estimator, requests
        self.skipped: dict[str, Any] | None = None
        self.chosen: dict[str, Any] | None = None
        self._in_memory: tuple[str, Cursor] | None = None  # kept in memory alone

    def flush(self, reason: str, deadline: Deadline) -> None:
        """Copy missing snapshots to slower tiers at a stop, as far as time allows. Every rank."""
        limit_s = UNLIMITED_S
        if self._channel.world.rank == 0:  # it decides for all
            limit_s = self._upload_limit_s(reason, _left_s(deadline))
        self._saver.uploads.drain(UploadDeadline(limit_s))

    def flush_all(self, leave_request: Callable[[], tuple[str, float | None] | None]) -> None:
        """Upload the rest after the run has finished. Every rank; a request to leave limits the
        time as at a stop."""
        limit = UploadDeadline(UNLIMITED_S, leave_request, self._upload_limit_s)
        self._saver.uploads.drain(limit)

    def _upload_limit_s(self, reason: str, left_s: float | None) -> float:
        return self._saver.uploads.limit_s(reason, left_s, on_this_host=self._on_one_host)

    def tiers_with(self, snapshot: str | None) -> list[str]:
        """Return the names of the tiers that hold the snapshot."""
        if self._in_memory is not None and self._in_memory[0] == snapshot and self.chosen:
            return [self.chosen["tier"]]
        return self._saver.uploads.tiers_with(snapshot)

    def standing(self, cursor: Cursor) -> tuple[str | None, int]:
        """Return the newest snapshot to resume from, and the micro-batches since it."""
        newest = self._in_memory or self._saver.committed or self._parent
        if newest is None:
            return None, cursor.micro_batches
        name, at = newest
        if at.place() == cursor.place():
            return name, 0
        return name, max(1, cursor.micro_batches - at.micro_batches)

    def save(
        self, cursor: Cursor, reason: str, deadline: Deadline, *, stops: bool = False
    ) -> SaveFailed | None:
        """Save, or return the failure. Every rank calls it at the same boundary.

        `stops`: the run goes on later, so the save may stay where the next attempt finds it.
        """
        failure = self._save_or_skip(_End(cursor, reason, deadline, stops=stops))
        left_s = _left_s(deadline)
        self._saver.join(left_s)
        within_s = PRUNE_WITHIN_S if left_s is None else min(left_s, PRUNE_WITHIN_S)
        self._saver.wait_for_retention(within_s)
        return failure

    def _save_or_skip(self, end: _End) -> SaveFailed | None:
        saver = self._saver
        saver.replication.pause()
        self._wait(end.deadline)
        snapshot, lost = self.standing(end.cursor)
        mine: dict[str, Any] = {
            "stands": bool(snapshot) and not lost,
            "in_flight": saver.busy,
            "left_s": _left_s(end.deadline),
            "save_s": self._estimator.save_s(),
            "fallback": snapshot is not None,
            "asked": self._requests.waiting(),
        }
        if end.stops and not saver.busy:
            mine |= self._abilities(end.reason)
        try:
            everyone = self._gather("last save", mine)
        except NoAgreement as error:
            why = f"not all ranks reached the stop in time: {error.message}"
            return self._skip(end, mine, why)
        calls = merged(each["asked"] for each in everyone)
        stands = everyone[0]["stands"]  # rank 0 commits, so its value counts
        if stands and not calls:
            if not end.stops and self._channel.world.rank == 0:
                saver.prune()
            return None
        failure = self._take_agreed(
            replace(end, stands=stands, tags=tags_of(calls)), mine, everyone
        )
        self._resolve(calls, failure)
        return None if stands else failure

    def _take_agreed(
        self, end: _End, mine: dict[str, Any], everyone: Sequence[dict[str, Any]]
    ) -> SaveFailed | None:
        """Act on everyone's abilities, alike on all ranks. A committed place is not saved to
        memory again."""
        is_busy = any(each["in_flight"] for each in everyone)
        if not is_busy and end.stops and not end.stands and self._choose(everyone) != LOCAL:
            if self._save_to_memory(end):
                return None
            mine |= {"left_s": _left_s(end.deadline), "in_flight": self._saver.busy}
            try:
                everyone = self._gather("not kept", mine)
            except NoAgreement as error:
                return self._skip(end, mine, f"not all ranks answered in time: {error.message}")
            is_busy = any(each["in_flight"] for each in everyone)
        why = IN_FLIGHT if is_busy else why_not_save(everyone)
        if why:
            return self._skip(end, mine, why)
        handle = self._save(end)
        if isinstance(handle.error, TensorsChanged):
            logger.warning("final save failed, retrying from a copy: %s", handle.error.message)
            handle = self._save(end, copied=True)
        if not handle.ended:
            return self._skip(end, mine, "it was not committed before the deadline")
        return handle.error

    def _gather(self, key: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        left_s = mine["left_s"]
        limit_s = RANKS_TIMEOUT_S if left_s is None else min(left_s, RANKS_TIMEOUT_S)
        return self._channel.gather(key, mine, limit_s)

    def _resolve(self, calls: Sequence[Call], failure: SaveFailed | None) -> None:
        """Resolve the waiting calls of `save()`: with this save, or as failed."""
        if failure is not None:
            is_first = self._channel.world.rank == 0
            self._requests.fail_all(calls, failure.message, logs=is_first)
        elif self._in_memory is not None and self.chosen is not None:  # with its tags: no warning
            name, tier = self._in_memory[0], self.chosen["tier"]
            why = f"{name} is only in {tier} yet; the next attempt will commit it"
            self._requests.fail_all(calls, why, logs=False)
        elif self._saver.in_flight is not None:
            self._requests.resolve(calls, self._saver.in_flight)

    def _abilities(self, reason: str) -> dict[str, Any]:
        """Return this rank's abilities besides a save to the run directory."""
        saver = self._saver
        is_ready = saver.arenas.are_ready and saver.arenas.outlive_process
        memory_s = self._estimator.memory_s() if is_ready and saver.has_room else None
        others_s = saver.replication.seconds
        machine_goes = takes_machine(reason, os.environ)
        return {
            "memory_s": memory_s,
            "partner_s": None if memory_s is None or others_s is None else memory_s + others_s,
            "machine_goes": machine_goes,
            "leaving": self._channel.world.host if self._host_goes() else "",
            "num_losses": saver.replication.num_losses,
            "place_goes": bool(machine_goes) and self._on_one_host,
            "slower": saver.uploads.predicted(),
        }

    def _choose(self, everyone: Sequence[dict[str, Any]]) -> str:
        """Choose the tier, the same on all ranks; log it, and keep it for the record."""
        left_s = min((e["left_s"] for e in everyone if e["left_s"] is not None), default=None)
        machine_goes = everyone[0]["machine_goes"]
        choice, why = choose_tier(machine_goes, left_s, tier_options(everyone))
        predicted, left = (None if s is None else round(s, 3) for s in (choice.predicted_s, left_s))
        self.chosen = {
            "tier": choice.tier,
            "why": why,
            "predicted_s": predicted,
            "seconds_left": left,
        }
        if self._channel.world.rank == 0 and (left_s is not None or machine_goes):
            took = "" if choice.predicted_s is None else f", in about {choice.predicted_s:.1f} s"
            logger.info("final save goes to %s%s: %s", choice.tier, took, why)
        return choice.tier if choice.tier in (MEMORY, PARTNER) else LOCAL

    def _save_to_memory(self, end: _End) -> bool:
        """Take it to memory; False: it is not there, on any rank."""
        assert self.chosen is not None
        self._saver.replication.prepare_final(others=self.chosen["tier"] == PARTNER)
        handle = self._save(end, in_memory=True)
        if handle.error is None and handle.why_not_replicated == "" and handle.snapshot:
            self._in_memory = handle.snapshot, end.cursor
            return True
        if self._channel.world.rank == 0:
            why = handle.error.message if handle.error else "the deadline has passed"
            logger.warning("final save did not reach %s: %s", self.chosen["tier"], why)
        self.chosen["failed"] = True
        return False

    def go_on(self, channel: RankStore) -> RankStore:
        """Prepare for another final save after the stop is undone. Return fresh keys for all
        ranks."""
        self.skipped = self.chosen = self._in_memory = None
        self._saver.replication.unpause()
        self._channel = channel.scoped("went on")
        return self._channel

    def _save(self, end: _End, *, copied: bool = False, in_memory: bool = False) -> SaveHandle:
        handle = self._saver.save(
            end.cursor, end.reason, end.tags, SaveHandle(), final=not copied, in_memory=in_memory
        )
        try:
            self._wait(end.deadline)
        finally:  # also when an alarm's exception ends the wait: the script may go on and write
            if not handle.ended and handle.why_not_replicated is None:
                self._saver.abandon()
        return handle

    def _wait(self, deadline: Deadline) -> None:
        """Wait until no save is in flight, or until the deadline, which may move closer."""
        while self._saver.busy:
            left_s = _left_s(deadline)
            if left_s == 0.0:
                return
            self._saver.join(LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
        self._saver.join()

    def _skip(self, end: _End, mine: Mapping[str, Any], why: str) -> SaveFailed:
        if end.stands:  # only the tags are missing
            return SaveFailed(why)
        left_s = mine["left_s"]
        self.skipped = {
            "cursor": end.cursor.to_json(),
            "why": why,
            "predicted_s": round(mine["save_s"], 3),
            "seconds_left": None if left_s is None else round(left_s, 3),
        }
        if self._channel.world.rank == 0:
            logger.warning("no snapshot at %s: %s", end.cursor, why)
        return SaveFailed(f"no snapshot at {end.cursor}: {why}")


def _left_s(deadline: Deadline) -> float | None:
    left_s = deadline.left_s()
    return None if left_s is None else max(left_s - LEAVE_S, 0.0)
