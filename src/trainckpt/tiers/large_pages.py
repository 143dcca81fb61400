"""Large pages for fresh memory of this process, where the system makes them quickly.

To be given memory by pages of 4 KiB takes as long as copying to it three times over. Linux gives
larger ones to who asks (madvise): pages of 2 MiB, and, where an administrator lets it (since 6.8),
of sizes between. A virtual machine that gives free memory back to its host gives back just what
2 MiB pages are made of: to have one fetched takes fifty times as long as one that is there. So
each is measured as it is made, and slow ones are borne as long as the quick ones have saved more;
then none is asked for in a while. Sizes between are made of what a machine keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.tiers.direct import (
    HUGE_BYTES,
    PAGE_BYTES,
    address,
    at_address,
    libc,
    memory,
    populate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
SMALL_S = 0.0005  # what pages of 4 KiB take for as much
LENT_S = 0.0005  # of a first page: as it is measured it may take a little longer
MOST_S = 0.05  # what has been saved counts for no more: a machine may have used up what it had
STALLED_S = 0.1  # by the clock on the wall: what this thread slept for, it had no core for
AGAIN_S = 60.0  # until one is tried again
_KIB = 1024


class LargePages:
    """What large pages a system has, and how quickly they came so far.

    Attributes:
        huge: Whether it gives pages of 2 MiB to who asks, and only then.
        between: Whether it gives smaller ones to who asks.
        always: Whether it gives any to everybody.

    Args:
        settings: Where the system tells that.
        clock: Seconds that this thread had a core, what its host did for it counted in.
    """

    def __init__(
        self, settings: Path = SETTINGS, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._not_until, self._known_until = clock, 0.0, 0.0
        self._saved_s = LENT_S
        everywhere = given(settings)
        sizes = [size for size, who in everywhere.items() if who == "madvise"]
        self.always = "always" in everywhere.values()
        self.huge = HUGE_BYTES in sizes
        self.between = any(PAGE_BYTES < size < HUGE_BYTES for size in sizes)

    @property
    def is_slow(self) -> bool:
        """Whether none of 2 MiB is asked for, because they took longer than small ones would."""
        return time.monotonic() < self._not_until

    @property
    def come_by_themselves(self) -> bool:
        """Whether fresh memory that was prepared is of large pages: no small ones are to be made.

        What is not known of those of 2 MiB is tried.
        """
        if self.always or self.between or not self.huge or self.is_slow:
            return self.always or self.between
        if time.monotonic() >= self._known_until:
            self._known_until = time.monotonic() + AGAIN_S
            self.prepare(memory(2 * HUGE_BYTES))  # one page, wherever it begins
        return not self.is_slow

    def prepare(self, block: memoryview) -> None:
        """Have what can be of large pages made of them, before anybody writes to this memory.

        Those of 2 MiB are made now, those between as they are written to.

        Args:
            block: Fresh memory, private to this process.
        """
        where = address(block)
        if where is None:
            return
        begin = -(-where // PAGE_BYTES) * PAGE_BYTES
        end = (where + len(block)) // PAGE_BYTES * PAGE_BYTES
        first = min(-(-begin // HUGE_BYTES) * HUGE_BYTES, end)
        made = self._make_huge(first, end) if self.huge else first
        if self.between:
            for low, high in ((begin, first), (made, end)):
                self._ask(low, high)

    def make(self, block: memoryview) -> None:
        """Have all pages of this memory made now; as `prepare`."""
        self.prepare(block)
        populate(block)

    def _make_huge(self, first: int, end: int) -> int:
        """Make pages of 2 MiB from `first` on, as long as that pays; where they end."""
        if self.is_slow:
            return first
        while first + HUGE_BYTES <= end:
            began, began_s = self._clock(), time.monotonic()
            _advise(first, HUGE_BYTES)
            is_made = populate(at_address(first, HUGE_BYTES))  # before 5.14 it is not, nor measured
            first += HUGE_BYTES
            took_s, waited_s = self._clock() - began, time.monotonic() - began_s
            self._saved_s = min(self._saved_s + SMALL_S - took_s, MOST_S)
            if self._saved_s < 0 or waited_s > STALLED_S or not is_made:
                self._not_until, self._saved_s = time.monotonic() + AGAIN_S, LENT_S
                break
        return first

    def _ask(self, low: int, high: int) -> None:
        """Have sizes between made as soon as somebody writes; and none of 2 MiB.

        The system takes the largest that fits: where one small page is there already, 2 MiB do not.
        """
        if self.huge:
            for whole in range(-(-low // HUGE_BYTES) * HUGE_BYTES, high, HUGE_BYTES):
                populate(at_address(whole, PAGE_BYTES))
        if low < high:
            _advise(low, high - low)


@functools.cache
def large_pages() -> LargePages:
    """Of this system."""
    return LargePages()


def _advise(where: int, num_bytes: int) -> None:
    size, advice = ctypes.c_size_t(num_bytes), ctypes.c_int(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(AttributeError):
        libc().madvise(ctypes.c_void_p(where), size, advice)


def given(settings: Path = SETTINGS) -> dict[int, str]:
    """Size in bytes -> who is given pages of it: "always" everybody, "madvise" who asks."""
    general = _chosen(settings / "enabled")
    sizes = {}
    if hasattr(mmap, "MADV_HUGEPAGE"):
        for size in settings.glob("hugepages-*kB/enabled"):
            name = size.parent.name.removeprefix("hugepages-").removesuffix("kB")
            sizes[int(name) * _KIB] = _chosen(size)
        if not sizes:
            sizes = {_whole(settings / "hpage_pmd_size"): "inherit"}  # before 6.8 there was one
    found = {size: general if who == "inherit" else who for size, who in sizes.items()}
    return {
        size: who
        for size, who in found.items()
        if size > PAGE_BYTES and who in ("always", "madvise")
    }


def _chosen(setting: Path) -> str:
    """The word in brackets; "" if there is none."""
    try:
        text = setting.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return text.partition("[")[2].partition("]")[0]


def _whole(setting: Path) -> int:
    try:
        return int(setting.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
