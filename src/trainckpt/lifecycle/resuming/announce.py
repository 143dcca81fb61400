"""What people are told without asking: where the run goes on, and that a notice was heard.

A stop is acted on only at a later boundary. People press Ctrl-C again if nothing answers, and
the second one leaves at once, unsaved.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from trainckpt.lifecycle.resuming.still_alive import still_alive
from trainckpt.lifecycle.run.log import logger
from trainckpt.preemption.notice import OF_MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.exactness import Exactness
    from trainckpt.lifecycle.resuming.resume import Beginning
    from trainckpt.preemption.notice import Notice, NoticeSource
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.places import Place


STOPPING = "stopping at the next boundary that all ranks reach"
LATE = "training has ended already, and is saved"


class Announced:
    """Passes every call on to `source`; logs each reason once. Watcher thread.

    Attributes:
        asked: The reason that it gave and when the process has to be gone, by the monotonic
            clock (inf: nobody said); None: there was none.
        is_late: Training has ended, so nobody looks for a boundary.
    """

    def __init__(
        self, source: NoticeSource, on_notice: Callable[[], object] = lambda: None
    ) -> None:
        self._source = source
        self._on_notice = on_notice
        self._said: set[str] = set()
        self.asked: tuple[str, float] | None = None
        self.is_late = False

    def start(self) -> None:
        """See `NoticeSource`."""
        self._source.start()

    def fileno(self) -> int | None:
        """See `NoticeSource`."""
        return self._source.fileno()

    def poll(self) -> list[Notice]:
        """What came since the last call."""
        notices = self._source.poll()
        for notice in notices:
            left_s = math.inf if notice.seconds_left is None else notice.seconds_left
            ends_s = time.monotonic() + left_s
            if self.asked is None or ends_s < self.asked[1]:
                self.asked = notice.reason, ends_s
            if notice.reason not in self._said:
                self._said.add(notice.reason)
                self._on_notice()
                logger.info("%s: %s", notice.reason, LATE if self.is_late else STOPPING)
        return notices

    @property
    def says_machine_goes(self) -> bool:
        """Whether it has said that this machine is about to go, or is not well."""
        return any(reason.startswith(OF_MACHINE) for reason in tuple(self._said))

    def forget(self) -> None:
        """What was stopped for is undone: the same reason is said again. Any thread."""
        self._said, self.asked = set(), None

    def stop(self) -> None:
        """See `NoticeSource`."""
        self._source.stop()


def say_where(tier: Place, beginning: Beginning, exactness: Exactness, registry: Registry) -> None:
    """From where the attempt begins, how exactly, what was passed over, and who is there too."""
    if alive := still_alive(tier, beginning.record.attempt):
        logger.warning(alive)
    for refused, reason in (beginning.refused or {}).items():
        logger.info("passed over %s: %s", refused, reason)
    where = f"{tier.url}, attempt {beginning.record.attempt}"
    if beginning.manifest is None:
        why = f" ({beginning.why_fresh})" if beginning.why_fresh else ""
        logger.info("%s: begins at step 0%s", where, why)
        return
    name, cursor = beginning.manifest.name, beginning.cursor
    logger.info("%s: resumed from %s, %s: %s", where, name, cursor, exactness.line)
    for reason in exactness.reasons:
        logger.info("not bitwise: %s", reason)
    _say_added(registry)


def say_how_it_stops(stops: str, grace_s: float | None, lost: Sequence[str]) -> None:
    """Where a stop falls, what time it has, and what is missing without a supervisor."""
    within = "" if grace_s is None else f", within {grace_s:g} s of a signal"
    logger.info("a stop falls on %s%s", stops, within)
    if lost:
        logger.info("not started by `trainckpt run`: %s", "; ".join(lost))


def _say_added(registry: Registry) -> None:
    """Which optimizers were given groups that the script has not made yet."""
    for optimizer in registry.optimizers:
        if optimizer.added:
            logger.info(
                "%s was given %d of the snapshot's parameter groups, which the script adds as it "
                "trains; should it add them again before the first batch, they stay as they are",
                optimizer.name, optimizer.added,
            )  # fmt: skip
