"""Store the signals that come before the ranks can agree on a stop.

A second interrupt ends the process at once. A Checkpointer that does not begin to train within a
limit after a signal would swallow it for good, so the process leaves then: nothing was trained.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.attempt.status_files import LEFT
from trainckpt.format.attempt_record import STOPPED
from trainckpt.ranks.threads import SelfPipe

if TYPE_CHECKING:
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.notice import Notice
    from trainckpt.stop.notice_sources import LoggedNoticeSource

EARLY_LOOK_S = 0.05
EARLY_LIMIT_S = 30.0


def early_limit_s(grace_s: float | None) -> float:
    """Return how long after a notice a run may take to begin, in seconds."""
    return EARLY_LIMIT_S if grace_s is None else min(EARLY_LIMIT_S, grace_s / 2)


class EarlySignals(threading.Thread):
    """Thread that stores notices from the Checkpointer's construction on, until `stop`."""

    def __init__(
        self,
        source: LoggedNoticeSource,
        *,
        grace_s: float | None,
        status_writer: RankStatusWriter,
        exit_code: int,
    ) -> None:
        super().__init__(name="trainckpt-early", daemon=True)
        self._source, self._limit_s = source, early_limit_s(grace_s)
        self._status_writer, self._exit_code = status_writer, exit_code
        self._notices: list[tuple[float, Notice]] = []
        self._stopping = threading.Event()
        self._wake = SelfPipe()

    def run(self) -> None:
        """Store the notices; leave if the run does not begin within the limit."""
        descriptor = self._source.fileno()
        if descriptor is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._stopping.is_set():
                ready, now_s = selector.select(EARLY_LOOK_S), time.monotonic()
                self._wake.drain()  # a forked process rings at its end too
                if any(key.fd == descriptor for key, _ in ready):
                    self._notices += [(now_s, notice) for notice in self._source.poll()]
                elif self._notices and now_s - self._notices[0][0] > self._limit_s:
                    self._leave(self._notices[0][1].reason)

    def stop(self) -> list[Notice]:
        """Stop the thread and return the notices received, with the time left by now."""
        self._stopping.set()
        self._wake.ring()  # else a resume would wait for its next poll
        self.join()
        self._wake.close()
        now_s = time.monotonic()
        return [
            notice
            if notice.seconds_left is None
            else replace(notice, seconds_left=max(notice.seconds_left - (now_s - at_s), 0.0))
            for at_s, notice in self._notices
        ]

    def _leave(self, reason: str) -> None:
        logger.warning("%s: leaving before the run has begun", reason)
        self._status_writer.update(state=LEFT, how=STOPPED, exit_code=self._exit_code)
        os._exit(self._exit_code)
