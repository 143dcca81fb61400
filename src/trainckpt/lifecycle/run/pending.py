"""The handle of a save: what it has reached, and waiting for more.

    requested --> staged --> local --> durable     (without slower tiers the last two are one)
         \\__________\\________> failed

Made by the training thread, moved on by it (requested, staged), by the saving thread (local) and
by whoever copies snapshots to the tier that is durable. What fails there is told to whoever waits
for it, and tried again: the save itself stands.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, SaveFailed, TrainckptError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTED, STAGED, COMMITTED, DURABLE = 0, 1, 2, 3
MOMENTS = {"staged": STAGED, "local": COMMITTED, "durable": DURABLE}
PARTNER = "partner"
NO_PARTNER = "redundancy names no rank of another host"


class PendingSave:
    """One save, on its way to its moments.

    Attributes:
        snapshot: Full name of the snapshot, once it is staged.
        error: Why it failed, or None.
        not_durable: Why its last copy to the durable tier failed, or None.
        put_off: Why it could not be begun at its boundary and will be at a later one, or "".
        unprotected: "" once other hosts hold it too, or why they do not; None: not known yet.
        is_asked: Whether anybody may wait for it: each slower tier gets it, whatever its interval.
        settle: Called by the training thread before it waits, if it does: some copies are made
            beside it, and other ranks hold the save back for a step to come.
    """

    def __init__(self, training_thread: int | None = None) -> None:
        self.snapshot: str | None = None
        self.error: SaveFailed | None = None
        self.not_durable: SaveFailed | None = None
        self.unprotected: str | None = None
        self.put_off = ""
        self.is_asked = True
        self.settle: Callable[[], None] = lambda: None
        self._training_thread = training_thread or threading.get_ident()
        self._reached = REQUESTED
        self._for_good = False
        self._others: list[PendingSave] = []
        self._changed = threading.Condition()

    def wait(self, moment: str = "durable", timeout_s: float | None = None) -> PendingSave:
        """Block until the save has reached `moment`: "staged", "partner", "local" or "durable".

        Raises:
            SaveFailed: it did not commit; older snapshots stand. Of "durable": it was committed,
                and copying it failed; that may be tried again, so wait again. On the training
                thread also while it is put off (`put_off`): train on, and wait again.
            ConfigurationError: an unknown moment, or one that can only be reached at a later
                boundary while this is the thread that has to get there.
            TimeoutError: not reached within `timeout_s` seconds.
        """
        if moment == PARTNER:
            return self._wait_protected(timeout_s)
        if moment not in MOMENTS:
            hint = "wait for staged, partner, local or durable"
            raise ConfigurationError(f"no tier of this run reaches the moment {moment!r}",
                                     hint=hint)  # fmt: skip
        if self._reached < MOMENTS[moment] and self.error is None:
            self._settle(timeout_s)
        with self._changed:
            if self._reached == REQUESTED and self.error is None and self._is_training_thread():
                raise self._not_taken_yet()
            wanted = MOMENTS[moment]
            over = self._changed.wait_for(
                lambda: self._reached >= wanted or self._why_not(wanted) is not None, timeout_s
            )
            why_not = None if self._reached >= wanted else self._why_not(wanted)
            if wanted == DURABLE and not self._for_good:
                self.not_durable = None  # said once; a later wait is for the next try
        if not over:
            raise TimeoutError(f"the save has not reached {moment} after {timeout_s} s")
        if why_not is not None:
            raise why_not
        return self

    def _not_taken_yet(self) -> TrainckptError:
        if self.put_off:
            hint = "train on, and wait again: it is taken as soon as that one is through"
            return SaveFailed(f"not taken yet: {self.put_off}", hint=hint)
        return ConfigurationError(
            "this save is taken at the next boundary, which this thread would never reach",
            hint="keep the handle, and wait after the next batch was asked for",
        )

    def _why_not(self, wanted: int) -> SaveFailed | None:
        return self.error or (self.not_durable if wanted == DURABLE else None)

    def _wait_protected(self, timeout_s: float | None) -> PendingSave:
        self.wait("staged", timeout_s)
        if self.unprotected is None and self.error is None:
            self._settle(timeout_s)
        with self._changed:
            known = self._changed.wait_for(
                lambda: self.error is not None or self.unprotected is not None, timeout_s
            )
        if not known:
            raise TimeoutError(f"the save has not reached {PARTNER} after {timeout_s} s")
        if self.error is not None:
            raise self.error
        if self.unprotected == NO_PARTNER:
            hint = 'redundancy="partner" on two hosts or more, or wait for another'
            raise ConfigurationError(
                f"no tier of this run reaches the moment {PARTNER!r}: {NO_PARTNER}", hint=hint
            )
        if self.unprotected:
            raise SaveFailed(f"{self.snapshot} is not held by other hosts: {self.unprotected}")
        return self

    @property
    def ended(self) -> bool:
        """True once it is committed or has failed."""
        return self.error is not None or self._reached >= COMMITTED

    def reach(self, state: int, snapshot: str | None = None) -> None:
        """The save has come as far as `state`."""
        with self._changed:
            self._reached, self.put_off = max(self._reached, state), ""
            self.snapshot = snapshot or self.snapshot
            self._changed.notify_all()
            for other in self._others:
                other.reach(state, snapshot)

    def protect(self, why_not: str = "") -> None:
        """Other hosts hold it too, or why they will not."""
        with self._changed:
            self.unprotected = why_not
            self._changed.notify_all()

    def fail(self, error: SaveFailed) -> None:
        """The save will not commit."""
        with self._changed:
            self.error, self.put_off = error, ""  # on whatever rank: no other tries it again
            self._changed.notify_all()

    def fail_durable(self, error: SaveFailed, *, for_good: bool = False) -> None:
        """It is committed, and the copy to the durable tier failed, for now or for good."""
        with self._changed:
            self.not_durable, self._for_good = error, for_good
            self._changed.notify_all()
            for other in self._others:
                other.fail_durable(error, for_good=for_good)

    def also(self, other: PendingSave) -> None:
        """This save, which is committed, is `other` too: that one reaches what it reaches."""
        with self._changed:
            self._others.append(other)
            other.unprotected = self.unprotected
            other.reach(self._reached, self.snapshot)
            if self.not_durable is not None:
                other.fail_durable(self.not_durable, for_good=self._for_good)

    def _settle(self, timeout_s: float | None) -> None:
        """Training stands still from here on, if it does: who only looks does not wait."""
        if self._is_training_thread() and timeout_s != 0:
            self.settle()

    def _is_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread
