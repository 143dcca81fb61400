"""A source of notices that says when one has come, since a stop is acted on only later.

People press Ctrl-C again if nothing answers, and the second one leaves at once, unsaved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.log import logger

if TYPE_CHECKING:
    from trainckpt.preemption.notice import Notice, NoticeSource


class Announced:
    """Passes every call on to `source`; logs each reason once. Watcher thread."""

    def __init__(self, source: NoticeSource) -> None:
        self._source = source
        self._said: set[str] = set()

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
            if notice.reason not in self._said:
                self._said.add(notice.reason)
                logger.info("%s: stopping at the next boundary that all ranks reach", notice.reason)
        return notices

    def stop(self) -> None:
        """See `NoticeSource`."""
        self._source.stop()
