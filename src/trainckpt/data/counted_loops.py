"""Find loops that count batches from 0 or 1, though they go on in the middle of an epoch.

`enumerate(ckpt.batches())` and `zip(range(n), ckpt.batches())` begin anew after a resume. Often the
number is only printed, so this is worth a hint and no doubt. One look over the objects of the
process finds them, at the first batch after the resume. If the number decides where a window ends,
as in `(i + 1) % 4 == 0`, the window that the resume began in becomes longer than those after it:
`CountedWindows` reports that.

An `itertools.cycle` keeps the batches of its first pass and repeats them. A resume makes it anew,
so it begins a new pass instead, and that is reported.
"""

from __future__ import annotations

import gc
import itertools
import math
import types
from typing import TYPE_CHECKING, Any

from trainckpt.data.loader import TrackedIterator
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from trainckpt.format.cursor import Cursor
    from trainckpt.format.exactness import Report

CYCLED = (
    "itertools.cycle repeats the batches of its first pass, and a resume makes it anew, so other "
    "batches follow. Read the loader by a generator: while True: yield from ckpt.loader(...)"
)
_COUNTERS = (type(iter(range(0))), itertools.count, enumerate)


def counter_of(iterator: Any, batches: int) -> str:
    """Return "enumerate" or "zip" if one counts this iterator's batches from the first; else "".

    `batches`: those trained in the epoch, from which a loop may count on.
    """
    for one in gc.get_objects():
        kind = type(one)
        if kind is not enumerate and kind is not zip:
            continue
        parts = one.__reduce__()[1]
        if kind is enumerate:
            if parts[1] < min(batches, 2) and _reads(parts[0], iterator):
                return "enumerate"
        elif any(type(part) in _COUNTERS for part in parts) and any(
            _reads(part, iterator) for part in parts
        ):
            return "zip"
    return ""


def cycled() -> list[str]:
    """Return the names of tracked loaders that an `itertools.cycle` reads."""
    cycles = [one for one in gc.get_objects() if type(one) is itertools.cycle]
    parts = [part for one in cycles for part in gc.get_referents(one)]
    return sorted({part.loader_name for part in parts if type(part) is TrackedIterator})


def hint(iterator: Any, cursor: Cursor, *, by_epochs: bool) -> str:
    """Return a sentence for a loop that counts a resumed pass anew; "" for another loop."""
    counter = counter_of(iterator, cursor.batches)
    if not counter:
        return ""
    lines = {
        "enumerate": "write enumerate(ckpt.batches(), ckpt.cursor.batches)",
        "zip": "write zip(range(ckpt.cursor.batches, ...), ckpt.batches())",
    }
    line = lines[counter] if by_epochs else "find the end of a window by ckpt.cursor.micro"
    return (
        f"{counter} counts the batches of epoch {cursor.epoch} from the first again, and "
        f"{cursor.batches} were trained. If more than a printed number depends on it, {line}"
    )


class CountedWindows:
    """Compares the first windows after a resume inside a window, in a loop that counts anew.

    The first is too long if it is longer than the next one, and than those before the resume were
    on average, or by just the micro-batches that it had before the resume; in a run's first
    window, if it is longer than the next two, which are equal.

    Attributes:
        is_over: All are compared.
    """

    def __init__(self, window_start: Cursor, micro: int, report: Report) -> None:
        """Compare the windows from this one on.

        Args:
            window_start: Of the window that the resume began in.
            micro: Micro-batches that it had before the resume.
            report: Takes a fault.
        """
        self.is_over, self._micro = False, micro
        steps = self._step = window_start.step
        self._average = math.ceil(window_start.micro_batches / steps) if steps else None
        self._report = report
        self._sizes: list[int] = []  # in micro-batches

    def reach_boundary(self, step: int, window: int | None) -> None:
        """Note the steps by now, and the micro-batches of the last window."""
        if step == self._step or window is None:
            return
        self._step = step
        self._sizes.append(window)
        first, *later = self._sizes
        self.is_over = len(later) == (2 if self._average is None else 1)
        others = later if self._average is None else [*later, self._average]
        is_usual = self._average is not None or len(set(later)) == 1
        is_longer = self._average is not None and first == self._micro + self._average
        if not (self.is_over and is_usual and (first > max(others) or is_longer)):
            return
        reason = (
            f"the first window after the resume had {first} micro-batches, more than others: the "
            "loop counts anew, so it stepped the optimizer at another place. End a window by "
            "ckpt.cursor.micro"
        )
        self._report(Restored("windows", How.NOT_KEPT, reason))


def _reads(source: Any, iterator: Any) -> bool:
    """Return True for the iterator itself, or a generator over it, such as tqdm's."""
    if type(source) is not types.GeneratorType:
        return source is iterator
    frame = source.gi_frame
    return frame is not None and any(value is iterator for value in frame.f_locals.values())
