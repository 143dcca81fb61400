"""Requests: which call of `ckpt.save()` became which save.

The n-th call of any rank asks for the same save. A rank may call after the save was taken, since
another rank had asked first: it gets the handle of that save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed
from trainckpt.lifecycle.log import logger
from trainckpt.lifecycle.pending import PendingSave

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.ranks.decision import Decision


class Requests:
    """Handles of requested saves, by the number of the call."""

    def __init__(self) -> None:
        self._calls = 0
        self._handles: dict[int, PendingSave] = {}

    def ask(self) -> tuple[int, PendingSave]:
        """This rank's next call: its number, and the handle of its save."""
        self._calls += 1
        handle = self._handle(self._calls)
        self._forget_ended()
        return self._calls, handle

    def taken(self, number: int | None) -> PendingSave:
        """The handle of the save that is taken now; a fresh one if nobody called for it."""
        return PendingSave() if number is None else self._handle(number)

    def drop(self, skipped: Iterable[Decision]) -> None:
        """All ranks skipped these saves."""
        for decision in skipped:
            logger.warning("a save (%s) was skipped: %s", decision.reason, decision.why)
            if decision.number is not None:
                self._handle(decision.number).fail(SaveFailed(f"skipped: {decision.why}"))

    def fail_waiting(self, how: str) -> None:
        """The attempt has ended: what was asked for and not taken never will be."""
        for handle in self._handles.values():
            if not handle.ended and handle.snapshot is None:
                handle.fail(SaveFailed(f"not taken: the attempt has {how} before"))

    def _handle(self, number: int) -> PendingSave:
        return self._handles.setdefault(number, PendingSave())

    def _forget_ended(self) -> None:
        done = [n for n, h in self._handles.items() if n < self._calls and h.ended]
        for number in done:
            del self._handles[number]
