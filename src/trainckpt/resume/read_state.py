"""Read this rank's part of a snapshot: first the values, which determine the other reads.

A snapshot saved by as many ranks in the same layout is read as it was: every rank its own part.
Otherwise each rank reads the boxes it holds now, and takes the values of a donor: the rank of its
number, or else of its number modulo the saved number of ranks.

A rank may have names that others lack, as a pipeline stage does: each is compared with its own
saved names. On another number of ranks it is compared with the names of all, or a stage would be
lost unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import StateMismatch
from trainckpt.snapshot.restore import Reader
from trainckpt.state import apply
from trainckpt.state.captured import VALUES, Saved
from trainckpt.state.destination import Destination
from trainckpt.state.restore_targets import find_targets
from trainckpt.state.stored_values import parse_values
from trainckpt.state.zero_copy import FROM_BYTES, AdoptedTensors, Proofs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.ranks.world import World
    from trainckpt.state.registry import Registry
    from trainckpt.state.restore_targets import Targets
    from trainckpt.storage.base import Readable

SAME_WAY = "launch the same number of ranks and layout, or move sharded tensors out of that object"


@dataclass
class StateRead:
    """One rank's reading of a snapshot.

    Attributes:
        targets: The tensors this rank needs.
        entries: The donor's entries among the snapshot's tensors.
        again: Reads the state that the script changes before training goes on.
        num_threads: Number of concurrent copies.
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

    @property
    def donor(self) -> int:
        """Return the snapshot's rank whose values this rank takes."""
        return self.world.rank % self.reader.manifest.world

    def _is_own(self, manifest: Manifest) -> bool:
        """Return True if the donor is this very rank and its random generators continue here.

        False if several ranks train the same samples now and perhaps did not then: their generators
        would differ, and their common state would drift apart.
        """
        drew_alike = self.targets.exact or not self.registry.has_peers
        return self.donor == self.world.rank and self.donor not in manifest.lost and drew_alike

    def finish(self) -> Saved:
        """Compare the complete read with the live objects, without touching them.

        Raises:
            StateMismatch: the script's objects differ from the snapshot; lists every difference.
            UnusableSnapshot: a part is missing.
        """
        manifest, targets = self.reader.manifest, self.targets
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
            given=AdoptedTensors(tensors, proofs, self._read_again, self.destination.borrowed),
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
) -> tuple[StateRead, Saved]:
    """Read and verify the data this rank needs, and compare it with the live objects.

    Args:
        tier: The tier to read from.
        manifest: The snapshot's manifest.
        registry: The live objects; not touched.
        world: This rank.
        later: Source for state that the script changes before training goes on; default `tier`.
        num_threads: Number of concurrent copies.

    Returns:
        The reading, and its result.

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
        targets.problems.append(
            "an older release took it inside a window, without the window's start"
        )
    if targets.problems:
        raise StateMismatch(
            f"snapshot {manifest.name} cannot be resumed in this layout",
            targets.problems,
            hint=SAME_WAY,
        )
    own = _become_live(registry, manifest.tensors)
    destination = Destination(targets.wanted, own=own)
    again = reader.from_tier(later or tier)
    reading = StateRead(
        reader=reader,
        registry=registry,
        world=world,
        values=values,
        targets=targets,
        destination=destination,
        again=again,
        entries=entries,
        num_threads=num_threads,
    )
    reader.read(targets.wanted, destination, donor=donor)
    return reading, reading.finish()


def _become_live(registry: Registry, entries: Mapping[str, TensorEntry]) -> set[str]:
    """Return the large tensors whose memory the resume makes live: those of CPU optimizers."""
    on_host = [o for o in registry.optimizers if all(p.is_cpu for p in o.parameters())]
    of_optimizers = tuple(f"{optimizer.name}/" for optimizer in on_host)
    return {
        name
        for name, entry in entries.items()
        if name.startswith(of_optimizers)
        and entry.num_bytes >= FROM_BYTES
        and (entry.layout is None or not entry.layout.dividing)
    }


def _held_by(reader: Reader, donor: int) -> Mapping[str, TensorEntry]:
    """Return the snapshot's tensors, without the unsharded ones of other ranks alone."""
    entries, lost = reader.manifest.tensors, reader.manifest.lost
    if lost:  # other ranks' tensors stand in for those of the lost
        return entries
    own = {place.region.tensor for place in reader.places(donor)}
    return {n: entry for n, entry in entries.items() if entry.layout is not None or n in own}
