"""Keep the random generators as they were when the running epoch began.

A script may draw at the head of an epoch, before the first batch: a permutation, a size, a mask. A
resume in the middle of that epoch runs the head again. So `ckpt.epochs()` records the generators
before each epoch, and puts them back before the one resumed in. The first boundary then restores
those of the snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.data import randomness
from trainckpt.state import script_generators

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry

PART = "epoch head"  # no keyword can be spelled so


def record(registry: Registry, epoch: int) -> None:
    """Record the generators before the head of this epoch runs."""
    registry.epoch_head = {
        "epoch": epoch,
        "main": randomness.packed_rng(),
        "objects": randomness.capture(registry.watched.generators()),
        "script": randomness.capture(script_generators.variables(registry)),
    }


def capture(registry: Registry, out: Captured) -> None:
    """Add the record, if there is one."""
    if registry.epoch_head is not None:
        out.values[PART] = out.encode(registry.epoch_head, PART)


def restore(registry: Registry, saved: Saved, epoch: int) -> None:
    """Restore the generators if the snapshot was taken in this epoch, by this rank."""
    tree = saved.values.get(PART)
    if tree is None or not saved.is_own:
        return
    head = saved.decode(tree)
    if head["epoch"] == epoch:
        randomness.restore(registry.watched.generators(), head["objects"], "")
        randomness.restore(script_generators.variables(registry), head["script"], "")
        randomness.set_main_rng(head["main"])
