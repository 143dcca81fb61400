"""The shapes of a notice and of its source, as the watcher needs them.

They are defined, with their contract, in preemption.notice: a neighbour, whose classes fit these
shapes without either room knowing the other.

Floor 1. Uses: ranks.decision. Used by: ranks.watcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.ranks.decision import Action, Mode


class Asked(Protocol):
    """Someone will stop this run, or asks for a save."""

    @property
    def reason(self) -> str:
        """Who asked, in words for the log."""

    @property
    def action(self) -> Action:
        """Save and leave, or save and go on."""

    @property
    def mode(self) -> Mode | None:
        """Where a stop may fall; None: as configured."""

    @property
    def seconds_left(self) -> float | None:
        """A duration, as of now; None: nobody said."""

    @property
    def tag(self) -> str | None:
        """The name a save asked for."""


class Source(Protocol):
    """`start`, then `fileno` and `poll` from the watcher thread, then `stop`."""

    def start(self) -> None:
        """Main thread."""

    def fileno(self) -> int | None:
        """Readable when a notice came; None: only look once a second."""

    def poll(self) -> Sequence[Asked]:
        """What came since the last call; must not block."""

    def stop(self) -> None:
        """Main thread."""
