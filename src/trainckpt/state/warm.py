"""Warm memory: fresh memory of this process, made while what belongs there is still being read.

The system hands out memory page by page and clears each: for a large state that takes as long as
copying it several times over. What is read into the host's memory, for all of its ranks, is copied
from there to each rank's own, and becomes live there; so the ranks have that memory made meanwhile.
"""

from __future__ import annotations

import math
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from trainckpt.tiers.direct import HUGE_BYTES, address, memory
from trainckpt.tiers.large_pages import large_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.manifest import TensorEntry
    from trainckpt.state.registry import Registry

FROM_BYTES = 64 << 10  # of a tensor; what is smaller shares its pages with others
STEP_BYTES = 16 << 20  # made at a time: no more than that goes on once it is stopped


class WarmMemory:
    """Memory for some tensors, by name; empty until `begin`."""

    def __init__(self) -> None:
        self._made: dict[str, memoryview] = {}
        self._sizes: dict[str, int] = {}
        self._refused: set[str] = set()  # what was asked for: nobody asks again
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Have so many bytes made for each tensor, by a thread; once."""
        self._sizes = dict(sizes)
        self._thread = threading.Thread(target=self._make, name="trainckpt-warm", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Make no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._made.clear()

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor without content, in memory that was made for it; None if there is none.

        Then there will be none: whoever asks makes some.
        """
        with self._lock:
            self._refused.add(name)
            made = self._made.pop(name, None)
        if made is None or len(made) != math.prod(shape) * dtype.itemsize:
            return None
        return torch.frombuffer(made, dtype=dtype).view(shape)

    def _make(self) -> None:
        for name, num_bytes in self._sizes.items():
            if name in self._refused:
                continue
            fresh = memory(num_bytes)
            first = -(address(fresh) or 0) % HUGE_BYTES  # no large page is cut in two
            for at, end in pairwise(
                [0, *range(first or STEP_BYTES, num_bytes, STEP_BYTES), num_bytes]
            ):
                if self._stop.is_set():
                    return
                if name in self._refused:
                    break
                large_pages().make(fresh[at:end])
            with self._lock:
                if name not in self._refused:
                    self._made[name] = fresh


def made_anew(registry: Registry, entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Bytes of the tensors that a resume makes anew, rather than copying them to live ones.

    Args:
        registry: The live objects.
        entries: The snapshot's tensors.
    """
    on_host = [o for o in registry.optimizers if all(p.is_cpu for p in o.parameters())]
    of_optimizers = tuple(f"{optimizer.name}/" for optimizer in on_host)
    return {
        name: entry.num_bytes
        for name, entry in entries.items()
        if name.startswith(of_optimizers) and entry.num_bytes >= FROM_BYTES
        and (entry.layout is None or not entry.layout.dividing)
    }  # fmt: skip
