"""Keep which untracked DataLoaders a script is in the middle of, to name them after a resume.

A loop that calls `ckpt.boundary()`, or that takes a second batch from a loader beside the tracked
one, holds such an iterator. A save stores how far each was read since training began. At its first
boundary a resumed script either is as far again, or the position is lost. Readers that were open
before training, such as a look at one batch, and those read to their end are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trainckpt.data.untracked import note_iterator, open_iterators
from trainckpt.state import script_randomness

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved

PART = "untracked loaders"  # no keyword can be spelled so


class OpenLoaders:
    """The untracked iterators of one rank's script."""

    def __init__(self) -> None:
        # batches read before training, by iterator; None: the loop is a framework's
        self._before: WeakKeyDictionary[Any, int] | None = None

    def begin(self) -> None:
        """Note how far the iterators were read before the first boundary.

        Those made before the Checkpointer are looked for in the script's variables. A look at all
        objects would touch every page of memory that a forked process shares.
        """
        for _, names in script_randomness.scopes():
            for value in list(names.values()):
                note_iterator(value)
                parts = value.values() if type(value) is dict else value
                for part in list(parts) if type(value) in (list, tuple, dict) else ():
                    note_iterator(part)
        self._before = WeakKeyDictionary()
        for iterator, _, batches in open_iterators():
            self._before[iterator] = batches

    def capture(self, out: Captured) -> None:
        """Add the position of each iterator that was read since."""
        if self._before is None:
            return
        positions = [
            [data, batches]
            for iterator, data, batches in open_iterators()
            if batches != self._before.get(iterator, 0)
        ]
        if positions:
            out.values[PART] = out.encode(sorted(positions), PART)

    def lost(self, saved: Saved) -> list[str]:
        """Return the saved positions at which no iterator is."""
        tree = saved.values.get(PART)
        if tree is None or not saved.is_own:
            return []
        positions = saved.decode(tree)
        for _, data, batches in open_iterators():
            if [data, batches] in positions:
                positions.remove([data, batches])
        return [f"{data} after {batches} batches" for data, batches in positions]
