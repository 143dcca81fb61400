"""Pause the processes at an agreed stop, after the commit, so that they can be dumped.

    every rank, training thread, at the boundary of the stop
    1   check for a dump request: the same one on all ranks                else: leave
    2   run the script's `before_dump` hooks; then shut NVML down (`close_connections`), and hold
        all requests to object stores (`hold_requests`)
        ALL  exchange errors; after any error all leave
    3   find, then drop memory that the snapshot holds (`lean_dump`); then destroy the process
        groups, if any rank has one that cannot be in a dump (`communicators`)
        ALL  as before, after each of the three; they are undone after an error
    4   notify the supervisor, and pause: nothing is touched any more. The supervisor dumps and
        ends all of them, or reports why not; then 3 is undone, and all leave with the snapshot

    the same processes, later, as another attempt, once the supervisor has released all of them
    5   read the dropped memory from the snapshot, and compare it with its old value; make the
        process groups again, and use them once
        ALL  exchange errors, so that no rank waits for another in a collective
    6   release the requests, open NVML again; run the script's `after_restore` hooks
        ALL  after any error all end at once, and the restorer goes on from the snapshot
    The stop is undone before 5, so that the next one is received; training goes on.

The watcher runs through all of this and has nothing to do: no request is pending.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.script_hooks import HookFailed
from trainckpt.attempt.status_files import LEFT, REFUSED, launch_folder, wait_until_all_run
from trainckpt.dumping import handshake
from trainckpt.dumping.handshake import RankQuiesced
from trainckpt.errors import NoAgreement, UnusableSnapshot
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.storage import connections

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.attempt.record_writer import AttemptId
    from trainckpt.attempt.script_hooks import Hooks
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.dumping.communicators import Communicators
    from trainckpt.dumping.handshake import DumpRequest
    from trainckpt.dumping.lean_dump import LeanDump
    from trainckpt.ranks.store import RankStore
    from trainckpt.stop.notice_listener import NoticeListener


REQUESTED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02


class DumpPause:
    """One rank's pause for a dump. Sequence of calls: `here` at each agreed stop.

    Attributes:
        why_not: Reason that the last requested dump was not made, or "".
    """

    def __init__(
        self,
        *,
        channel: RankStore,
        hooks: Hooks,
        number: AttemptId,
        listener: NoticeListener,
        status_writer: RankStatusWriter,
        lean: LeanDump | None,
        communicators: Communicators | None = None,
    ) -> None:
        """Store the arguments; `lean`: None if memory must stay as it is."""
        self.why_not = ""
        self._channel, self._hooks, self._number = channel, hooks, number
        self._listener, self._status_writer, self._lean = listener, status_writer, lean
        self._communicators = communicators
        self._torn: Communicators | None = None  # at this stop, if any rank has to
        self._folder = launch_folder()
        self._times = 0
        self._handled_id = ""
        self._quiesced = RankQuiesced("")

    @property
    def is_requested(self) -> bool:
        """Return True if this rank sees a dump request."""
        request = handshake.read_request(self._folder) if self._folder is not None else None
        return request is not None and request.id != self._handled_id

    def here(self, round_: int, snapshot: str | None) -> bool:
        """Pause for a dump, if one was requested. Every rank calls it, after the final save.

        Args:
            round_: Round of the stop.
            snapshot: Full name of the snapshot committed at this very boundary, or None.

        Returns:
            True: these processes were dumped and are another attempt now; training goes on.
            False: leave.
        """
        self.why_not = ""
        if self._folder is None:
            return False
        self._times += 1
        request = handshake.read_request(self._folder)
        if request is not None and request.refused:
            request = None  # its requester does not wait any more
        mine = {"id": request.id if request else "", "round": round_, "snapshot": snapshot}
        try:
            everyone = self._gather("asked", mine, REQUESTED_WITHIN_S)
            if (
                request is None
                or request.id == self._handled_id
                or {m["id"] for m in everyone} != {request.id}
            ):
                return False
            self._handled_id = request.id
            self._listener.deadline.hold()
            return self._pause(request, everyone[0]["snapshot"], max(m["round"] for m in everyone))
        except NoAgreement as error:
            self.why_not = error.message if request is not None else ""
            if not all(part is None or part.is_whole for part in (self._lean, self._torn)):
                self._exit(error.message)  # putting it back takes all ranks
            return False
        finally:
            connections.release_requests()
            self._listener.deadline.go_on()

    def _pause(self, request: DumpRequest, snapshot: str | None, round_: int) -> bool:
        self._quiesced = RankQuiesced(request.id)
        self.why_not = self._prepare(snapshot) or self._wait(request)
        if self.why_not:
            if self._channel.world.rank == 0:
                logger.warning("no process dump, the snapshot stands: %s", self.why_not)
            if why := self._refill():  # the script may read its tensors after the stop
                self._exit(f"cannot read back the memory dropped for the dump: {why}")
            return False
        self._listener.forget_stop(round_)  # first: a signal from now on is another stop's
        self._come_back()
        self._status_writer.update(asked=False)
        if self._channel.world.rank == 0:
            logger.info("restored from a process dump, as attempt %d", self._number.value)
        return True

    def _prepare(self, snapshot: str | None) -> str:
        """Run steps 2 and 3; return the errors of all ranks, or ""."""
        lean = self._lean if snapshot is not None else None
        mine = self._communicators is not None and self._communicators.is_needed
        is_needed = any(self._gather("communicators", mine))
        self._torn = torn = self._communicators if is_needed else None

        def close() -> None:
            self._hooks.call_before_dump()
            # after the hooks, which may close an NVML of their own
            self._listener.close_connections()
            connections.hold_requests()

        def prepare() -> None:
            if lean is not None:
                lean.prepare(snapshot or "")
            if torn is not None:
                torn.examine()

        def drop() -> None:
            if lean is not None:
                dropped = lean.drop()
                self._quiesced = replace(self._quiesced, snapshot=snapshot or "", dropped=dropped)

        # each only if all ranks came through the one before: the next may be collective
        why = self._agree("closed", _try(close)) or self._agree("ready", _try(prepare))
        why = why or self._agree("dropped", _try(drop))
        if torn is None or why:
            return why
        why = self._agree("apart", _try(torn.tear_down))
        if not why and self._channel.world.rank == 0:
            logger.info("process groups are destroyed for the process dump")
        return why

    def _wait(self, request: DumpRequest) -> str:
        """Run step 4; return why there is no dump, or "" after the restore."""
        assert self._folder is not None
        before = self._number.value
        try:
            handshake.report_quiesced(self._folder, self._channel.world.rank, self._quiesced)
        except OSError as error:
            return f"cannot write into the supervisor's folder: {error}"
        while True:
            why, now = "", handshake.read_request(self._folder)
            if now is None or now.id != request.id or now.is_alone:
                why = "its supervisor is gone"
            elif now.refused:
                why = now.refused
            if self._number.value != before:  # last: a dump may fall between any two lines
                wait_until_all_run(self._folder)  # from here on this process may end
                return ""
            if why:
                return why
            time.sleep(LOOK_EVERY_S)

    def _come_back(self) -> None:
        """Run steps 5 and 6."""

        def open_again() -> None:
            connections.release_requests()  # before the hooks, which may use a store
            self._listener.reopen_connections()
            self._hooks.call_after_restore()

        if why := self._agreed("back", self._refill() or _try(open_again)):
            self._exit(f"cannot continue after the restore: {why}")

    def _refill(self) -> str:
        """Run step 5; return the errors of any rank that left memory or groups incomplete, or
        ""."""
        lean, torn = self._lean, self._torn
        why = "" if lean is None else self._agreed("filled", _try(lean.refill))
        if torn is not None and not why:
            why = self._agreed("made", _try(torn.make))
            why = why or self._agreed("together", _try(torn.agree))
        return why or ("" if lean is None else _try(lean.make_buckets))

    def _agreed(self, key: str, why: str) -> str:
        """Run `_agree`; an unresponsive rank counts as ended."""
        try:
            return self._agree(key, why)
        except NoAgreement as error:
            return why or error.message

    def _exit(self, why: str) -> None:
        """End the process at once: the script's view and its saves could be anything."""
        logger.error("%s; leaving at once. The snapshot stands: run `trainckpt resume`", why)
        self._status_writer.update(state=LEFT, how=REFUSED, exit_code=UnusableSnapshot.exit_code)
        os._exit(UnusableSnapshot.exit_code)

    def _agree(self, key: str, why: str) -> str:
        """Return the errors of all ranks, joined."""
        whys = [f"rank {rank}: {each}" for rank, each in enumerate(self._gather(key, why)) if each]
        return "; ".join(whys)

    def _gather(self, key: str, value: Any, within_s: float = RANKS_TIMEOUT_S) -> list[Any]:
        return self._channel.gather(f"rest {self._times}/{key}", value, within_s)


def _try(call: Callable[[], object]) -> str:
    """Call and return the error as text, or "": the other ranks need any error."""
    try:
        call()
    except HookFailed as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as said
        return getattr(error, "message", None) or repr(error)
    return ""
