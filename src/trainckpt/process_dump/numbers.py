"""Numbers of processes and threads that a restored tree needs: it gets its old ones.

The system gives numbers out in turn. Where the turn is about to come to some that have to stay
free, it is told to go on after them, which takes what CRIU takes as well (CAP_CHECKPOINT_RESTORE).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LAST, END = Path("/proc/sys/kernel/ns_last_pid"), Path("/proc/sys/kernel/pid_max")
AHEAD = 4096  # more than a minute of what a machine starts that is busy: seen, 50 a second


def pass_over(numbers: Iterable[int]) -> None:
    """What is started in the next moments gets none of these; where nobody may say so, it may."""
    with contextlib.suppress(OSError, ValueError):
        last = int(LAST.read_text(encoding="ascii"))
        after = turn_after(last, numbers, int(END.read_text(encoding="ascii")))
        if after != last:
            LAST.write_text(str(after), encoding="ascii")


def turn_after(last: int, numbers: Iterable[int], end: int, ahead: int = AHEAD) -> int:
    """The number to count on from, so that none of these is within reach. Pure.

    Args:
        last: The one that was given out last.
        numbers: That are to stay free.
        end: All are below it; then it begins again.
        ahead: How many are to be given out before one of them, if they leave so many.
    """
    for number in sorted(numbers, key=lambda each: (each - last) % end):
        if (number - last) % end > ahead:
            break
        last = number
    return last
