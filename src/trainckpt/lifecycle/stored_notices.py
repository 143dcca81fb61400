"""Notices in an object store: the same names and the same words as notice files, asked for.

A list of the folder takes as long as the network does, so a thread of its own asks every few
seconds, on one rank of each host. What it cannot ask it asks again: a store that does not answer
stops nobody.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.preemption.halt_file import MAX_BYTES, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.preemption.notice import Notice
    from trainckpt.tiers.base import Tier

LOOK_EVERY_S = 3.0


class StoredNotices:
    """A `NoticeSource` without descriptor, for one attempt."""

    def __init__(
        self, tier: Tier, attempt: int, say: Callable[[str], object], every_s: float = LOOK_EVERY_S
    ) -> None:
        self._tier, self._prefix, self._say, self._every_s = tier, f"{attempt}-", say, every_s
        self._found: list[Notice] = []
        self._seen: dict[str, str] = {}  # name -> why it is no notice, "" if it is one
        self._said = ""
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainckpt-notices", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def fileno(self) -> int | None:
        """None: what has come is looked at once a second."""
        return None

    def poll(self) -> list[Notice]:
        """What has come since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """Ask no more; a question that is being asked is not waited for."""
        self._stopping.set()

    def look(self) -> None:
        """Ask once."""
        try:
            listed = self._tier.list(names.NOTICES)
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
            data = self._tier.read(f"{names.NOTICES}/{name}", max_bytes=MAX_BYTES)
            notice = parse(json.loads(data))
        except (TrainckptError, ValueError, RecursionError) as error:
            why = getattr(error, "message", str(error))[:200]
            if self._seen.get(name) != why:
                self._say(f"the notice {name} is not one, so nobody stops because of it: {why}")
            self._seen[name] = why
            return
        self._seen[name] = ""
        with self._lock:
            self._found.append(notice)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(self._every_s)
