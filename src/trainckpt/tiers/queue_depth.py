"""How many reads are on their way at once, beside a process whose own reads come first.

What lies in a disk's queue is served before everybody else's next read. With 32 MB there, a launch
whose modules are read from the same disk meanwhile takes a third of a second longer. Disks give
nearly all they can with few reads on their way, places that answer late (a mounted store) do not:
where little comes, the number grows, as long as that brings more. Pure: told of rates, it says a
number.

Floor 0. Uses: nothing. Used by: snapshot.fetch.
"""

from __future__ import annotations

FIRST = 2  # one is read while another is written
ENOUGH = 400e6  # bytes per second: no place that answers late gives so much with a few MB asked for
WORTH = 1.4  # twice as many on their way: so much faster, or it is not worth the others' waiting
RESTS = 8  # windows until twice as many are tried again: what was measured may have been disturbed


class QueueDepth:
    """Doubled while that pays.

    Attributes:
        now: Reads that may be on their way.
    """

    def __init__(self, most: int) -> None:
        self.now = min(FIRST, most)
        self._most = most
        self._before: float | None = None  # the rate with half of them, while twice is tried
        self._rests = 0

    def measured(self, rate: float) -> None:
        """So many bytes per second came over one window, with `now` reads on their way."""
        if self._before is not None and rate < WORTH * self._before:
            self.now //= 2
            self._before, self._rests = None, RESTS
        elif self._rests:
            self._rests -= 1
        elif rate < ENOUGH and 2 * self.now <= self._most:
            self._before = rate
            self.now *= 2
        else:
            self._before = None
