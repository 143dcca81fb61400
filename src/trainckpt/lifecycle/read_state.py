"""Read this rank's part of a snapshot: first the values, which say what else is needed.

What was saved by as many ranks in the same layout is read as it was: every rank its own. Else
each rank reads the boxes it holds now, and takes the values of a donor: the rank of its number,
or, where there was none, of its number modulo the ranks there were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import StateMismatch
from trainckpt.snapshot.restore import Reader
from trainckpt.state import apply
from trainckpt.state.captured import VALUES, Saved
from trainckpt.state.stage import Destination, parse_values
from trainckpt.state.targets import find_targets

if TYPE_CHECKING:
    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.world import World
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier

SAME_WAY = "launch as many ranks in the same layout, or keep no sharded tensors in that object"


def read_state(tier: Tier, manifest: Manifest, registry: Registry, world: World) -> Saved:
    """Read, verify, and compare with the live objects, which are not touched.

    Raises:
        StateMismatch: the script's objects differ from the snapshot; lists every difference.
        UnusableSnapshot: anything is missing or damaged.
        TierUnavailable: the tier refused.
    """
    reader, donor = Reader(tier, manifest), world.rank % manifest.world
    first = Destination({VALUES: None})
    reader.read({VALUES: None}, first, donor=donor)
    values = parse_values(first.finish({})[VALUES])
    entries = manifest.tensors
    targets = find_targets(registry, values, entries, world=world.size, then=manifest.world)
    if manifest.window is None and manifest.cursor.micro and not targets.exact:
        targets.problems.append("it was taken inside a window, by a release that kept no way back")
    if targets.problems:
        raise StateMismatch(
            f"snapshot {manifest.name} cannot be resumed in this layout",
            targets.problems,
            hint=SAME_WAY,
        )
    destination = Destination(targets.wanted)
    reader.read(targets.wanted, destination, donor=donor)
    saved = Saved(
        destination.finish({name: entries[name].dtype for name in targets.wanted}),
        values,
        shapes={name: entry.shape for name, entry in entries.items()},
        wraps=targets.wraps,
        exact=targets.exact,
        is_own=donor == world.rank,
        worlds=(manifest.world, world.size),
        left=frozenset(n for m in registry.models for n in m.left_out(values, entries)),
    )
    apply.check(registry, saved, str(manifest.name))
    return saved
