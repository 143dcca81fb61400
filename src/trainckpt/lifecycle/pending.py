"""The handle of a save: what it has reached, and waiting for more.

    requested --> staged --> local == durable      (one local directory: committed is durable)
         \\__________\\________> failed

Made by the training thread, moved on by it (requested, staged) and by the saving thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, SaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTED, STAGED, COMMITTED = 0, 1, 2
MOMENTS = {"staged": STAGED, "local": COMMITTED, "durable": COMMITTED}


class PendingSave:
    """One save, on its way to its moments.

    Attributes:
        snapshot: Full name of the snapshot, once it is staged.
        error: Why it failed, or None.
        settle: Called by the training thread before it waits: some copies are made beside it.
    """

    def __init__(self, training_thread: int | None = None) -> None:
        self.snapshot: str | None = None
        self.error: SaveFailed | None = None
        self.settle: Callable[[], None] = lambda: None
        self._training_thread = training_thread or threading.get_ident()
        self._reached = REQUESTED
        self._changed = threading.Condition()

    def wait(self, moment: str = "durable", timeout_s: float | None = None) -> PendingSave:
        """Block until the save has reached `moment`: "staged", "local" or "durable".

        Raises:
            SaveFailed: it did not commit; older snapshots stand.
            ConfigurationError: an unknown moment, or one that can only be reached at a later
                boundary while this is the thread that has to get there.
            TimeoutError: not reached within `timeout_s` seconds.
        """
        if moment not in MOMENTS:
            hint = "wait for staged, local or durable"
            raise ConfigurationError(f"no tier of this run reaches the moment {moment!r}",
                                     hint=hint)  # fmt: skip
        if self._is_training_thread():
            self.settle()
        with self._changed:
            if self._reached == REQUESTED and self.error is None and self._is_training_thread():
                raise ConfigurationError(
                    "this save is taken at the next boundary, which this thread would never reach",
                    hint="keep the handle, and wait after the next batch was asked for",
                )
            reached = self._changed.wait_for(
                lambda: self.error is not None or self._reached >= MOMENTS[moment], timeout_s
            )
        if not reached:
            raise TimeoutError(f"the save has not reached {moment} after {timeout_s} s")
        if self.error is not None:
            raise self.error
        return self

    @property
    def ended(self) -> bool:
        """True once it is committed or has failed."""
        return self.error is not None or self._reached == COMMITTED

    def reach(self, state: int, snapshot: str | None = None) -> None:
        """The save has come as far as `state`."""
        with self._changed:
            self._reached = max(self._reached, state)
            self.snapshot = snapshot or self.snapshot
            self._changed.notify_all()

    def fail(self, error: SaveFailed) -> None:
        """The save will not commit."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _is_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread
