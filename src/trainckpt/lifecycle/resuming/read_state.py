"""Read this rank's part of a snapshot: first the values, which say what else is needed.

What was saved by as many ranks in the same layout is read as it was: every rank its own. Else
each rank reads the boxes it holds now, and takes the values of a donor: the rank of its number,
or, where there was none, of its number modulo the ranks there were. What several ranks hold columns
of is left for `read_together`, once all have come so far.

Ranks may have names that others lack, as the stages of a pipeline do: each is compared with what it
had itself. On another number of ranks with what all had, or a stage would be lost without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.errors import StateMismatch, UnusableSnapshot
from trainckpt.format.layout import Box
from trainckpt.ranks import exchange
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.shared_plan import Sharing
from trainckpt.snapshot.shared_read import SharedRead
from trainckpt.state import apply
from trainckpt.state.captured import VALUES, Saved
from trainckpt.state.destination import Destination
from trainckpt.state.given import Given, Proofs
from trainckpt.state.stored_values import parse_values
from trainckpt.state.targets import find_targets
from trainckpt.state.warm import made_anew

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.ranks.world import World
    from trainckpt.snapshot.shares import Share
    from trainckpt.state.registry import Registry
    from trainckpt.state.targets import Targets
    from trainckpt.state.warm import WarmMemory
    from trainckpt.tiers.base import Readable

SAME_WAY = "launch as many ranks in the same layout, or keep no sharded tensors in that object"


@dataclass
class Reading:
    """What one rank has read of a snapshot, and what is left to read together with others.

    Attributes:
        targets: What this rank needs.
        entries: Of the snapshot's tensors, those that the donor had.
        shared: What is left; empty, and nothing left to be taken: all was read, and compared.
        again: Reads what the script changes before training goes on.
        num_threads: That may copy at once.
    """

    reader: Reader
    registry: Registry
    world: World
    values: dict[str, Any]
    targets: Targets
    destination: Destination
    again: Reader
    entries: Mapping[str, TensorEntry]
    num_threads: int = 1
    shared: list[SharedRead] = field(default_factory=list)

    @property
    def told(self) -> list[int] | None:
        """Where the other ranks of this host find what they left to this one."""
        return None if self.reader.share is None else list(self.reader.share.told())

    @property
    def is_all(self) -> bool:
        """Whether nothing is left to be read."""
        return not self.shared and (self.reader.share is None or not self.reader.share.left)

    def read_alone(self, names: set[str]) -> None:
        """Read this rank's boxes of these tensors; errors as `read_state`."""
        wanted = {name: box for name, box in self.targets.wanted.items() if name in names}
        self.reader.read(wanted, self.destination, donor=self.donor)

    @property
    def donor(self) -> int:
        """The rank of the snapshot whose values are taken."""
        return self.world.rank % self.reader.manifest.world

    def _is_own(self, manifest: Manifest) -> bool:
        """Whether the donor is this very rank, and what it drew from goes on here.

        Not where several ranks train the same samples now, and may not have then: their
        generators would differ, and what they hold alike would drift apart.
        """
        drew_alike = self.targets.exact or not self.registry.has_peers
        return self.donor == self.world.rank and self.donor not in manifest.lost and drew_alike

    def finish(self) -> Saved:
        """Everything was read: compare with the live objects, which are not touched.

        Raises:
            StateMismatch: the script's objects differ from the snapshot; lists every difference.
            UnusableSnapshot: a part is missing, or was left to others.
        """
        manifest, targets = self.reader.manifest, self.targets
        if not self.is_all:
            raise UnusableSnapshot(f"{manifest.name}: not all that was left to others was read")
        entries, all_entries = self.entries, manifest.tensors
        compared = entries if manifest.world == self.world.size else all_entries
        models = self.registry.models
        tensors = self.destination.finish({name: entries[name].dtype for name in targets.wanted})
        saved = Saved(
            tensors,
            self.values,
            shapes={name: entry.shape for name, entry in compared.items()},
            elsewhere=frozenset(all_entries.keys() - entries.keys()),
            wraps=targets.wraps,
            exact=targets.exact,
            is_own=self._is_own(manifest),
            worlds=(manifest.world, self.world.size),
            left=frozenset(n for m in models for n in m.left_out(self.values, entries)),
            proofs=(proofs := Proofs(self.reader.verified)),
            given=Given(tensors, proofs, self._read_again, self.destination.borrowed),
            num_threads=self.num_threads,
        )
        apply.check(self.registry, saved, str(manifest.name))
        return saved

    def _read_again(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        wanted = {name: self.targets.wanted[name] for name in names}
        destination = Destination(wanted)
        self.again.read(wanted, destination, donor=self.donor)
        entries = self.reader.manifest.tensors
        return destination.finish({name: entries[name].dtype for name in wanted})


def read_state(
    tier: Readable,
    manifest: Manifest,
    registry: Registry,
    world: World,
    *,
    later: Readable | None = None,
    num_threads: int = 1,
    warm: WarmMemory | None = None,
    share: Share | None = None,
) -> tuple[Reading, Saved | None]:
    """Read and verify what this rank needs and no other rank reads, or reads a part of.

    Args:
        tier: To read from.
        manifest: Of the snapshot.
        registry: The live objects, which are not touched.
        world: This rank.
        later: Where to read what the script changes before training goes on, if not from `tier`.
        num_threads: That may copy at once.
        warm: Memory for what becomes live where it was read to.
        share: What it reads of what the ranks of this host need alike.

    Returns:
        The reading, and what it read if nothing is left: compared with the live objects.

    Raises:
        StateMismatch: the script's objects differ from the snapshot; lists every difference.
        UnusableSnapshot: anything is missing or damaged.
        TierUnavailable: the tier refused.
    """
    reader, donor = Reader(tier, manifest, num_threads=num_threads), world.rank % manifest.world
    first = Destination({VALUES: None})
    reader.read({VALUES: None}, first, donor=donor)
    values = parse_values(first.finish({})[VALUES])
    entries = _held_by(reader, donor)
    then = manifest.world if not manifest.lost else 0  # the window begins anew for all
    targets = find_targets(registry, values, entries, world=world.size, then=then)
    if manifest.window is None and manifest.cursor.micro and not targets.exact:
        targets.problems.append("it was taken inside a window, by a release that kept no way back")
    if targets.problems:
        raise StateMismatch(
            f"snapshot {manifest.name} cannot be resumed in this layout",
            targets.problems,
            hint=SAME_WAY,
        )
    own = made_anew(registry, manifest.tensors)
    destination = Destination(targets.wanted, own=own, warm=warm)
    again = reader.from_tier(later or tier)
    if share is not None:
        share.apart = targets.layouts
    reader.share = share
    reading = Reading(
        reader, registry, world, values, targets, destination, again, entries, num_threads,
    )  # fmt: skip
    if targets.layouts and world.size > 1 and exchange.is_there():
        sharing = Sharing(manifest, reader.planner, world.rank)
        groups = sharing.groups(targets.wanted, targets.layouts)
        reading.shared = [SharedRead(group, reader) for group in groups]
    reader.read(alone(targets, reading.shared, manifest), destination, donor=donor)
    return reading, reading.finish() if reading.is_all else None


def _held_by(reader: Reader, donor: int) -> Mapping[str, TensorEntry]:
    """The snapshot's tensors without those of which other ranks alone had one."""
    entries, lost = reader.manifest.tensors, reader.manifest.lost
    if lost:  # others' stand in for what was theirs
        return entries
    own = {place.region.tensor for place in reader.places(donor)}
    return {n: entry for n, entry in entries.items() if entry.layout is not None or n in own}


def alone(targets: Targets, shared: list[SharedRead], manifest: Manifest) -> dict[str, Box | None]:
    """What a rank reads by itself; of what is stored as bytes and shared, only the type."""
    wanted = dict(targets.wanted)
    for tensor in (tensor for part in shared for tensor in part.group.tensors):
        box = wanted.pop(tensor.name)
        if box is not None and manifest.tensors[tensor.name].dtype == "U8":
            wanted[tensor.name] = Box(box.offset, (0,) * len(box.shape))
    return wanted
