"""Peak host memory of a benchmark, read off the machine's available memory.

Pinned and shared memory and other processes count as well; caches of files do not.
"""

from __future__ import annotations

import threading
from pathlib import Path

EVERY_S = 0.02


class LowestAvailable:
    """Sample available memory in a thread, inside a `with` block.

    Attributes:
        taken_bytes: Available memory at the beginning, less the lowest sample.
    """

    taken_bytes = 0

    def __enter__(self) -> LowestAvailable:
        self._first, self._is_over = available_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self.taken_bytes = max(self.taken_bytes, self._first - available_bytes())


def available_bytes() -> int:
    """Return the memory that programs can allocate without swapping (Linux)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
