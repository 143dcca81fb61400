"""How many reads or writes are on their way at once, beside a process whose reads come first.

What lies in a disk's queue is served before everybody else's next read. With 32 MB there, a launch
whose modules are read from the same disk meanwhile takes a third of a second longer, and a data
loader waits 13 ms for what takes 0.3. Disks give nearly all they can with few on their way, places
that answer late (a mounted store) do not: where little comes, the number grows, as long as that
brings more. Now and then half as many are tried: what had let it grow may be over, or was chance.
Pure: told of rates, it says a number.

Floor 0. Uses: nothing. Used by: snapshot.fetch, tiers.new_file.
"""

from __future__ import annotations

FIRST = 2  # one is read while another is written
ENOUGH = 400e6  # bytes per second: no place that answers late gives so much with a few MB asked for
WORTH = 1.4  # twice as many on their way: so much faster, or it is not worth the others' waiting
RESTS = 8  # windows until another number is tried again


class QueueDepth:
    """Doubled while that pays, halved where it did not.

    Attributes:
        now: How many may be on their way.
    """

    def __init__(self, most: int, enough: float = ENOUGH) -> None:
        """No more than `most`; where `enough` bytes per second come, no more are tried."""
        self.now = min(FIRST, most)
        self._most, self._enough = most, enough
        self._before: tuple[int, float] | None = None  # number and rate, while another is tried
        self._more_next = True
        self._rests = 0

    def measured(self, rate: float) -> None:
        """So many bytes per second came over one window, with `now` on their way."""
        if self._before is not None and not self._goes_on(self._before, rate):
            self._rests = RESTS
            return
        if self._rests:
            self._rests -= 1
            return
        can_be_more = rate < self._enough and 2 * self.now <= self._most
        can_be_fewer = self.now > FIRST
        if can_be_more and (self._more_next or not can_be_fewer):
            self._before, self.now = (self.now, rate), 2 * self.now
        elif can_be_fewer and not self._more_next:
            self._before, self.now = (self.now, rate), self.now // 2
        elif can_be_fewer:
            self._rests, self._more_next = RESTS, False

    def _goes_on(self, before: tuple[int, float], rate: float) -> bool:
        """Keep the better of two numbers; whether still more are to be tried at once."""
        number, (fewer, more) = self.now, sorted((before, (self.now, rate)))
        pays = more[1] >= WORTH * fewer[1]
        self.now = more[0] if pays else fewer[0]
        self._before, self._more_next = None, pays
        return pays and self.now == number
