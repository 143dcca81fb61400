"""Record what becomes of an attempt's saves, for its record: stages, sizes, and what went wrong.

    training thread   a save's wait
    saving thread     commits, failures
    upload threads    arrivals in slower tiers

Each call costs some microseconds, and none waits for a store. `RecordWriter` writes the history
with each change of the record; `format/save_history.py` keeps it short.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from trainckpt.format.names import SnapshotName
from trainckpt.format.save_history import (
    LONGEST,
    MOST_NOT_SAVED,
    NotKept,
    SaveHistory,
    SaveRow,
    dump_history,
    merge,
    thin,
)
from trainckpt.storage.redact import one_line

REMEMBERED = 64  # saves that may still arrive in slower tiers


class SaveRecorder:
    """The saves of one attempt. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[SaveRow] = []
        self._not_kept: deque[NotKept] = deque(maxlen=MOST_NOT_SAVED)
        self._totals: Counter[str] = Counter()  # of `TOTALS`
        self._begun: dict[str, float] = {}  # full name -> its boundary, on the monotonic clock

    def begin_anew(self) -> None:
        """Go on as another attempt: the processes were restored from a dump."""
        with self._lock:
            self._rows.clear()
            self._not_kept.clear()
            self._totals.clear()
            self._begun.clear()  # what still arrives is of the attempt before

    def note_commit(self, row: SaveRow, begun_s: float) -> None:
        """Note a snapshot in the run directory.

        Args:
            row: What is known of it.
            begun_s: Its boundary, on the monotonic clock.
        """
        with self._lock:
            self._rows.append(row)
            thin(self._rows)
            self._totals["committed"] += row.count
            self._totals["num_bytes"] += row.num_bytes
            self._begun[row.snapshot] = begun_s
            if len(self._begun) > REMEMBERED:
                del self._begun[next(iter(self._begun))]

    def note_kept_in_memory(self) -> None:
        """Note a snapshot that stays in the hosts' memory."""
        with self._lock:
            self._totals["in_memory"] += 1

    def note_arrival(self, snapshot: str, tier: str) -> None:
        """Note that a snapshot has arrived in a tier; one of an earlier attempt is left out."""
        now_s, name = time.monotonic(), SnapshotName.parse(snapshot)
        with self._lock:
            begun_s = self._begun.get(snapshot)
            if begun_s is None or name is None:
                return
            for index, row in enumerate(self._rows):
                own = SnapshotName.parse(row.snapshot)
                if own is not None and own >= name:  # merged with it, or itself
                    arrived = replace(row, count=0, copies={tier: max(now_s - begun_s, 0.0)})
                    self._rows[index] = merge(arrived, row)
                    return

    def note_not_kept(self, snapshot: str, how: str, reason: str, tier: str = "") -> None:
        """Note a save without a snapshot, or a snapshot that did not reach `tier`.

        Of one that is tried again and again the last try is kept; every try counts.
        """
        lost = NotKept(
            snapshot=snapshot,
            how=how,
            reason=one_line(reason, LONGEST),
            when=time.time(),
            tier=tier,
        )
        with self._lock:
            for earlier in list(self._not_kept):
                if (earlier.snapshot, earlier.how, earlier.tier) == (snapshot, how, tier):
                    self._not_kept.remove(earlier)
            self._not_kept.append(lost)
            self._totals[how.replace(" ", "_")] += 1

    def history(self) -> SaveHistory:
        """Return the history until now."""
        with self._lock:
            return SaveHistory(
                rows=tuple(self._rows), not_kept=tuple(self._not_kept), **self._totals
            )

    def to_json(self) -> dict[str, Any]:
        """Return the value of `saves` for the record; empty: there was none."""
        return dump_history(self.history()) if self._totals else {}
