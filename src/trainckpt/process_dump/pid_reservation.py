"""Keep process and thread ids free for a restored tree: it gets its old ids.

The system assigns ids in order. If it is about to reach reserved ids, `pass_over` moves it past
them. This needs the same privilege as CRIU (CAP_CHECKPOINT_RESTORE).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LAST, END = Path("/proc/sys/kernel/ns_last_pid"), Path("/proc/sys/kernel/pid_max")
AHEAD = 4096  # over a minute of new processes on a busy machine: 50 per second were seen


def pass_over(numbers: Iterable[int]) -> None:
    """Keep processes started in the next moments from these ids, if permitted."""
    with contextlib.suppress(OSError, ValueError):
        last_pid = int(LAST.read_text(encoding="ascii"))
        next_pid = turn_after(last_pid, numbers, int(END.read_text(encoding="ascii")))
        if next_pid != last_pid:
            LAST.write_text(str(next_pid), encoding="ascii")


def turn_after(last: int, numbers: Iterable[int], end: int, ahead: int = AHEAD) -> int:
    """Return the id to count on from, with none of these ids within reach. Pure.

    Args:
        last: The id assigned last.
        numbers: Ids to keep free.
        end: Upper bound of ids; counting then starts over.
        ahead: Ids to be assigned before any of `numbers`, if they leave so many.
    """
    for number in sorted(numbers, key=lambda each: (each - last) % end):
        if (number - last) % end > ahead:
            break
        last = number
    return last
