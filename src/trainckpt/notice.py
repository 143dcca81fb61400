"""A notice: one value for a request to stop the run or to save, from its source to the exit.

A source (`preemption`) makes it, the ranks agree on one of those they have (`ranks.decision`), and
the agreed one says at the boundary why the attempt stops or what it saves (`stop`, `save`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

Action = Literal["stop", "save"]
Mode = Literal["micro-batch", "window"]

# Prefix of reasons for a leaving or unhealthy machine: the run itself is still wanted.
AWS, GCE, AZURE, GPU, RAY = "AWS", "GCE", "Azure", "GPU", "Ray"
OF_MACHINE = tuple(f"{who} " for who in (AWS, GCE, AZURE, GPU, RAY))


@dataclass(frozen=True)
class Notice:
    """A stop of this run, or a request for a save.

    Attributes:
        reason: The requester, in words for the log: "SIGTERM", "trainckpt pause".
        action: "stop": save and leave. "save": save and go on.
        mode: Where a stop may fall; None means as configured, until the watcher fills it in.
        seconds_left: Seconds left as the notice is read: a duration, never a time of day, because
            hosts' clocks differ. None: no time given.
        tag: The name of a requested save, if any.
        number: For `ckpt.save()`: number of this call on its rank, from 1. Calls with one number,
            on whatever ranks, ask for one save. None: any save will do.
    """

    reason: str
    action: Action = "stop"
    mode: Mode | None = None
    seconds_left: float | None = None
    tag: str | None = None
    number: int | None = None


class NoticeSource(Protocol):
    """Sequence of calls: `start` once, then `poll` any number of times, then `stop` once.

    `start` and `stop` come from the main thread, `fileno` and `poll` from the watcher thread.
    `poll` is called when the descriptor is readable and about once a second; it must not
    block, and may report a notice again (a repeated one changes nothing).
    """

    def start(self) -> None:
        """Begin to listen."""

    def fileno(self) -> int | None:
        """Return the descriptor that turns readable with a notice; None: poll once a second."""

    def poll(self) -> Sequence[Notice]:
        """Return the notices since the last call; empty most of the time."""

    def stop(self) -> None:
        """Stop listening, and undo the changes of `start`."""


class PolledSource:
    """Base of sources without descriptor: the watcher polls them once a second."""

    def start(self) -> None:
        """Do nothing: there is nothing to set up."""

    def fileno(self) -> int | None:
        """Return None: there is no descriptor."""
        return None

    def stop(self) -> None:
        """Do nothing: there is nothing to undo."""
