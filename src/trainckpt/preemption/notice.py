"""A notice: someone will stop us, or wants a save; and the contract of whoever brings it.

A notice is a value. What happens because of it is agreed by all ranks (ranks/agreement.py)
and done at a boundary (lifecycle); a source never acts.

Floor 1. Uses: nothing of ours. Used by: this room and lifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# Reasons that begin so: the machine is about to go, or is not well. Nobody wanted the run to end.
AWS, GCE, AZURE, GPU = "AWS", "GCE", "Azure", "GPU"
OF_MACHINE = tuple(f"{who} " for who in (AWS, GCE, AZURE, GPU))


@dataclass(frozen=True)
class Notice:
    """Someone will stop this run, or asks for a save.

    Attributes:
        reason: Who asked, in words for the log: "SIGTERM", "trainckpt pause".
        action: "stop": save and leave. "save": save and go on.
        mode: Where a stop may fall; None means as configured.
        seconds_left: What is left when the notice is read: a duration, never a time of day,
            because hosts' clocks differ. None: nobody said.
        tag: The name a save asked for, if any.
    """

    reason: str
    action: Literal["stop", "save"] = "stop"
    mode: Literal["micro-batch", "window"] | None = None
    seconds_left: float | None = None
    tag: str | None = None


class NoticeSource(Protocol):
    """Sequence of calls: `start` once, then `poll` any number of times, then `stop` once.

    `start` and `stop` come from the main thread, `fileno` and `poll` from the watcher thread.
    `poll` is called when the descriptor is readable and about once a second; it must not
    block, and may report a notice again (a repeated one changes nothing).
    """

    def start(self) -> None:
        """Begin to listen."""

    def fileno(self) -> int | None:
        """The descriptor that turns readable with a notice; None: only look once a second."""

    def poll(self) -> list[Notice]:
        """Whatever came since the last call; empty most of the time."""

    def stop(self) -> None:
        """Listen no more, and put back what `start` changed."""
