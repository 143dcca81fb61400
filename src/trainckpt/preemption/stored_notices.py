"""Read notices in an object store, with the names and contents of notice files.

Listing the folder takes as long as the network does, so a thread of its own polls every few
seconds, on one rank of each host. A failed poll is repeated; a store that does not answer stops
nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.preemption.notice_file import MAX_BYTES, parse
from trainckpt.preemption.polling import PollingSource

if TYPE_CHECKING:
    from collections.abc import Callable


LOOK_EVERY_S = 3.0


class NoticeStore(Protocol):
    """The part of a tier that this source reads."""

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder."""

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Return an object's bytes; refuse one beyond `max_bytes`."""


class StoredNotices(PollingSource):
    """Notices of one attempt. Polling goes on: a stricter notice may follow."""

    def __init__(
        self,
        store: NoticeStore,
        attempt: int,
        say: Callable[[str], object],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        super().__init__(list, every_s, say, "trainckpt-notices")
        self._store, self._prefix = store, f"{attempt}-"
        self._seen: dict[str, str] = {}  # name -> why it is no notice, "" if it is one
        self._said = ""

    def look(self) -> None:
        """Poll once."""
        try:
            listed = self._store.list(names.NOTICES)
        except TrainckptError as error:
            if error.message != self._said:
                self._say(f"notices cannot be looked for: {error.message}")
            self._said = error.message
            return
        self._said = ""
        for name in listed:
            if name.startswith(self._prefix) and name.endswith(".json"):
                self._read(name)

    def _read(self, name: str) -> None:
        if self._seen.get(name) == "":
            return
        try:
            data = self._store.read(f"{names.NOTICES}/{name}", max_bytes=MAX_BYTES)
            notice = parse(json.loads(data))
        except (TrainckptError, ValueError, RecursionError) as error:
            why = getattr(error, "message", str(error))[:200]
            if self._seen.get(name) != why:
                self._say(f"{name} is not a notice and stops no rank: {why}")
            self._seen[name] = why
            return
        self._seen[name] = ""
        with self._lock:
            self._found.append(notice)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(self._pause_s)
