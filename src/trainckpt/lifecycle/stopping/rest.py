"""The rest: at an agreed stop, after the snapshot is committed, the processes may be dumped.

    every rank, training thread, at the boundary of the stop
    1   was a dump asked for? what rank 0 finds counts                    else: leave
    2   the script's `before_dump` hooks; then NVML is shut down (`Watch.suspend`)
        ALL  each says what went wrong; if anything did, all leave
    3   what the snapshot holds is dropped from memory (`lean`); then process groups are taken down,
        if any rank has one that cannot be in a dump (`communicators`)
        ALL  as before, after each of the two; both are undone
    4   tell the supervisor, and rest: nothing is touched any more. It dumps and ends all of them,
        or says why not; then 3 is undone, and all leave with the snapshot

    the same processes, later, as another attempt, once the supervisor has let go of all of them
    5   what was dropped is read from the snapshot, and compared with what it was; the process
        groups are made again, and used once
        ALL  each says what went wrong, so that nobody waits for it in what is collective
    6   NVML is opened again; the script's `after_restore` hooks
        ALL  if anything went wrong all end at once, and whoever brought them back goes on from the
             snapshot
    The stop is undone before 5, so that the next one is heard; training goes on.

The watcher lives on through all of this and has nothing to do: nobody asks for anything.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from trainckpt.errors import NoAgreement, UnusableSnapshot
from trainckpt.lifecycle.dumping import rest_told
from trainckpt.lifecycle.dumping.rest_told import Resting
from trainckpt.lifecycle.run.attempt_number import await_all
from trainckpt.lifecycle.run.hooks import HookFailed
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.told import LEFT, REFUSED, folder_of_launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.lifecycle.dumping.rest_told import RestOrder
    from trainckpt.lifecycle.run.attempt_number import AttemptNumber
    from trainckpt.lifecycle.run.hooks import Hooks
    from trainckpt.lifecycle.run.told import Teller
    from trainckpt.lifecycle.stopping.watch import Watch
    from trainckpt.ranks.channel import Channel

    class Lean(Protocol):
        """What need not be in a dump."""

        @property
        def is_whole(self) -> bool:
            """Whether nothing has to be undone."""

        def prepare(self, snapshot: str) -> None:
            """Find out what the snapshot holds."""

        def drop(self) -> int:
            """Give back the memory of that; how many bytes. All ranks, or none."""

        def refill(self) -> None:
            """Make it what it was; nothing to do if nothing was dropped."""

        def make_buckets(self) -> None:
            """What takes all ranks, once each has refilled."""

    class Communicators(Protocol):
        """What cannot be in a dump."""

        @property
        def is_whole(self) -> bool:
            """Whether nothing has to be undone."""

        @property
        def is_needed(self) -> bool:
            """Whether this rank has any."""

        def examine(self) -> None:
            """Raise where they cannot be taken down."""

        def tear_down(self) -> None:
            """Take them down. All ranks, or none."""

        def make(self) -> None:
            """Make them again; nothing to do if none was taken down."""

        def agree(self) -> None:
            """What takes all ranks, once each has made it."""


ASKED_WITHIN_S, RANKS_TIMEOUT_S = 60.0, 600.0
LOOK_EVERY_S = 0.02


class Rest:
    """Of one rank. Sequence of calls: `here` at each stop that was agreed.

    Attributes:
        why_not: Why the dump that was asked for at the last stop is not there, or "".
    """

    def __init__(
        self, channel: Channel, hooks: Hooks, number: AttemptNumber, watch: Watch, teller: Teller,
        lean: Lean | None, communicators: Communicators | None = None,
    ) -> None:  # fmt: skip
        """`lean`: None where memory must stay as it is."""
        self.why_not = ""
        self._channel, self._hooks, self._number = channel, hooks, number
        self._watch, self._teller, self._lean = watch, teller, lean
        self._communicators = communicators
        self._apart: Communicators | None = None  # at this stop, if any rank has to
        self._folder = folder_of_launch()
        self._times = 0
        self._obeyed, self._told = "", Resting("")

    @property
    def is_asked(self) -> bool:
        """Whether a dump is asked for, as far as this rank sees."""
        order = rest_told.given(self._folder) if self._folder is not None else None
        return order is not None and order.id != self._obeyed

    def here(self, round_: int, snapshot: str | None) -> bool:
        """Be dumped here, if that was asked for. Every rank calls it, after the last save.

        Args:
            round_: Of the stop.
            snapshot: Full name of the one that was committed of this very boundary; None: none was.

        Returns:
            True: these processes were dumped and are another attempt now; training goes on.
            False: leave.
        """
        self.why_not = ""
        if self._folder is None:
            return False
        self._times += 1
        order = rest_told.given(self._folder)
        if order is not None and order.refused:
            order = None  # nobody waits for it any more
        mine = {"id": order.id if order else "", "round": round_, "snapshot": snapshot}
        try:
            everyone = self._gather("asked", mine, ASKED_WITHIN_S)
            if (
                order is None
                or order.id == self._obeyed
                or {m["id"] for m in everyone} != {order.id}
            ):
                return False
            self._obeyed = order.id
            self._watch.deadline.hold()
            return self._obey(order, everyone[0]["snapshot"], max(m["round"] for m in everyone))
        except NoAgreement as error:
            self.why_not = error.message if order is not None else ""
            if not self._is_whole:  # putting it back takes all ranks
                self._end(error.message)
            return False
        finally:
            self._watch.deadline.go_on()

    @property
    def _is_whole(self) -> bool:
        parts = (self._lean, self._apart)
        return all(part is None or part.is_whole for part in parts)

    def _obey(self, order: RestOrder, snapshot: str | None, round_: int) -> bool:
        self._told = Resting(order.id)
        self.why_not = self._get_ready(snapshot) or self._wait(order)
        if self.why_not:
            if self._channel.world.rank == 0:
                logger.warning("not dumped, so the snapshot is used: %s", self.why_not)
            self._put_back()
            return False
        self._watch.forget_stop(round_)  # first: a signal from now on is another stop's
        self._come_back()
        self._teller.tell(asked=False)
        if self._channel.world.rank == 0:
            logger.info("restored from a dump, as attempt %d", self._number.value)
        return True

    def _get_ready(self, snapshot: str | None) -> str:
        """2 and 3; why not, on whatever rank, or ""."""
        lean = self._lean if snapshot is not None else None
        mine = self._communicators is not None and self._communicators.is_needed
        is_needed = any(self._gather("communicators", mine))
        self._apart = apart = self._communicators if is_needed else None

        def prepare() -> None:
            self._hooks.close_outside()
            self._watch.suspend()  # after the hooks, which may close an NVML of their own
            if lean is not None:
                lean.prepare(snapshot or "")
            if apart is not None:
                apart.examine()

        def drop() -> None:
            if lean is not None:
                self._told = replace(self._told, snapshot=snapshot or "", dropped=lean.drop())

        why = self._agree("ready", _try(prepare)) or self._agree("dropped", _try(drop))
        if apart is None or why:
            return why
        why = self._agree("apart", _try(apart.tear_down))
        if not why and self._channel.world.rank == 0:
            logger.info("process groups are taken down while the ranks rest")
        return why

    def _wait(self, order: RestOrder) -> str:
        """4. Why there is no dump, or "" once these processes are another attempt."""
        assert self._folder is not None
        before = self._number.value
        try:
            rest_told.rests(self._folder, self._channel.world.rank, self._told)
        except OSError as error:
            return f"the supervisor's folder cannot be written: {error}"
        while True:
            why, now = "", rest_told.given(self._folder)
            if now is None or now.id != order.id or now.is_alone:
                why = "its supervisor is gone"
            elif now.refused:
                why = now.refused
            if self._number.value != before:  # last: a dump may fall between any two lines
                await_all(self._folder)  # from here on this process may end
                return ""
            if why:
                return why
            time.sleep(LOOK_EVERY_S)

    def _come_back(self) -> None:
        """5 and 6."""

        def open_again() -> None:
            self._watch.resume()
            self._hooks.open_again()

        why = self._fill()
        why = self._agreed("back", why or _try(open_again))
        if why:
            self._end(f"brought back, but {why}")

    def _put_back(self) -> None:
        """The script may look at its tensors after the stop."""
        if why := self._fill():
            self._end(f"what was dropped for a dump could not be read back: {why}")

    def _fill(self) -> str:
        """5. Why memory or groups are not whole, on whatever rank, or ""."""
        lean, apart = self._lean, self._apart
        why = "" if lean is None else self._agreed("filled", _try(lean.refill))
        if apart is not None and not why:
            why = self._agreed("made", _try(apart.make))
            why = why or self._agreed("together", _try(apart.agree))
        return why or ("" if lean is None else _try(lean.make_buckets))

    def _agreed(self, key: str, why: str) -> str:
        """As `_agree`; a rank that does not answer has ended already."""
        try:
            return self._agree(key, why)
        except NoAgreement as error:
            return why or error.message

    def _end(self, why: str) -> None:
        """Nothing of the script may run any more: what it would see or save could be anything."""
        logger.error("%s; ending at once. The snapshot stands: `trainckpt resume`", why)
        self._teller.tell(state=LEFT, how=REFUSED, exit_code=UnusableSnapshot.exit_code)
        os._exit(UnusableSnapshot.exit_code)

    def _agree(self, key: str, why: str) -> str:
        """What went wrong on any rank."""
        whys = [f"rank {rank}: {each}" for rank, each in enumerate(self._gather(key, why)) if each]
        return "; ".join(whys)

    def _gather(self, key: str, value: Any, within_s: float = RANKS_TIMEOUT_S) -> list[Any]:
        return self._channel.gather(f"rest {self._times}/{key}", value, within_s)


def _try(call: Callable[[], object]) -> str:
    """What went wrong, or "": the other ranks have to hear of it, whatever it was."""
    try:
        call()
    except HookFailed as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as said
        return getattr(error, "message", None) or repr(error)
    return ""
