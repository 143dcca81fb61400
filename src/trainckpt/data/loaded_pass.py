"""The pass that a state was loaded in the middle of, and what loops have done with it since.

`zip` asks the first loader first. Stopped at that one's last batch, it goes on in the saved passes
of both, the first is over at once, and the second is never asked: nothing tells it that its pass
was left, but that nobody holds the iterator any more which was made to go on.

Used by: loader.py.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainckpt.data.loader import TrackedIterator, TrackedLoader


class LoadedPass:
    """Of one loader."""

    def __init__(self) -> None:
        self._number: int | None = None  # of the pass; None: no state was loaded, or in none
        self._first: weakref.ref[TrackedIterator] | None = None  # of those made since

    def load(self, loader: TrackedLoader) -> None:
        """The loader has just been put where a state says."""
        self._number, self._first = loader.passes_started if loader.in_pass else None, None

    def make(self, iterator: TrackedIterator) -> None:
        """An iterator of it was made."""
        if self._first is None:
            self._first = weakref.ref(iterator)

    def is_over(self, loader: TrackedLoader) -> bool:
        """The loader has gone on with it, and it has ended."""
        then = self._number
        return then is not None and not (loader.in_pass and loader.passes_started == then)

    def was_left(self, leader: TrackedLoader | None) -> bool:
        """Nothing more was taken of it, and the loop that could have is over with its leader's."""
        is_dropped = self._first is not None and self._first() is None
        return is_dropped and leader is not None and leader.loaded_pass.is_over(leader)
