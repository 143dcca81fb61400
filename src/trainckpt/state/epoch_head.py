"""Keep the random generators as they were when the running epoch began, if its head draws.

A script may draw at the head of an epoch, before the first batch: a permutation, a size, a mask. A
resume in the middle of that epoch runs the head again. Order of events:

    ckpt.epochs()    record the generators before each epoch; put back the saved ones before the
                     epoch resumed in
    first boundary   drop the record if they are unchanged: the head drew nothing, and snapshots
                     need not hold it. A resume then restores the generators of the snapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.data import randomness
from trainckpt.state import script_generators

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry

PART = "epoch head"  # no keyword can be spelled so


class EpochHead:
    """The generators of one rank before the running epoch.

    Attributes:
        is_open: The epoch's first training boundary has not been reached.
    """

    def __init__(self, registry: Registry) -> None:
        self.is_open = False
        self._registry = registry
        self._recorded: dict[str, Any] | None = None

    def begin(self, epoch: int) -> None:
        """Record the generators before the head of this epoch runs."""
        self._recorded = {"epoch": epoch, **generators(self._registry)}
        self.is_open = True

    def end(self) -> None:
        """Drop the record if the head drew nothing."""
        self.is_open = False
        if self._recorded is not None and unchanged(self._registry, self._recorded):
            self._recorded = None

    def capture(self, out: Captured) -> None:
        """Add the record, if there is one."""
        if self._recorded is not None:
            out.values[PART] = out.encode(self._recorded, PART)

    def restore(self, saved: Saved, epoch: int) -> None:
        """Restore the generators if the snapshot was taken in this epoch, by this rank."""
        tree = saved.values.get(PART)
        if tree is None or not saved.is_own:
            return
        head = saved.decode(tree)
        if head["epoch"] == epoch:
            randomness.restore(self._registry.watched.generators(), head["objects"], "")
            randomness.restore(script_generators.variables(self._registry), head["script"], "")
            randomness.set_main_rng(head["main"])


def generators(registry: Registry) -> dict[str, Any]:
    """Return the states of the global generators, of those in objects, and of the script's."""
    return {
        "main": randomness.packed_rng(),
        "objects": randomness.capture(registry.watched.generators()),
        "script": randomness.capture(script_generators.variables(registry)),
    }


def unchanged(registry: Registry, before: dict[str, Any]) -> bool:
    """Return True if no generator of an earlier result of `generators` has drawn since."""
    now = generators(registry)
    # names may have come: those of functions that run by now
    return all(before[part].items() <= now[part].items() for part in now)
