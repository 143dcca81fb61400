"""A dump without what a snapshot holds: dropped before, read from the snapshot and verified after.

A plain dump of a training is mostly parameters, gradients and optimizer state, which were written a
moment ago. Without them it is about as large as that of a small model, and sooner done; the dump
is of use only as long as that snapshot is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import catalog
from trainckpt.snapshot.restore import Reader
from trainckpt.state import lean
from trainckpt.state.capture import capture
from trainckpt.state.kinds import ddp

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.world import World
    from trainckpt.state.captured import Captured
    from trainckpt.state.lean import Dropped
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Readable


class Lean:
    """Of one rank. Sequence of calls: `prepare`, `drop` once all ranks have prepared, `refill`,
    `make_buckets` once all ranks have refilled.

    The last two are right at any time: they undo what was done.
    """

    def __init__(
        self, tier: Readable, run: str, world: World, registry: Registry,
        unused: Callable[[], memoryview],
    ) -> None:  # fmt: skip
        """`unused`: lets go of what only saves need; gives memory in which nothing is kept."""
        self._tier, self._run, self._rank, self._world = tier, run, world.rank, world.size
        self._registry, self._unused = registry, unused
        self._prepared: tuple[Captured, Manifest] | None = None
        self._dropped: tuple[Dropped, Manifest] | None = None
        self._buckets: list[Callable[[], None]] = []

    @property
    def is_whole(self) -> bool:
        """Whether nothing has to be undone."""
        return self._dropped is None and not self._buckets

    def prepare(self, snapshot: str) -> None:
        """Find out what the snapshot holds. Every rank, training thread.

        Raises:
            UnusableSnapshot: it cannot be read.
        """
        name = SnapshotName.parse(snapshot)
        if name is None:
            raise UnusableSnapshot(f"{snapshot[:60]} names no snapshot")
        captured = capture(self._registry)  # collective, so before anything that may fail
        manifest = catalog.load_manifest(self._tier, self._run, name)
        if manifest.world == self._world:  # else each rank holds what several have saved
            self._prepared = captured, manifest

    def drop(self) -> int:
        """Give back the memory of what was prepared. Every rank, or `make_buckets` waits for them.

        Returns:
            How many bytes.
        """
        if self._prepared is None:
            return 0
        (captured, manifest), self._prepared = self._prepared, None
        wrappers = dict.fromkeys(model.reducing for model in self._registry.models)
        for wrapper in wrappers:  # first: to make them anew is collective
            make = ddp.let_go_of_buckets(wrapper)
            self._buckets += [make] if make is not None else []
        lean.discard(self._unused())
        dropped = lean.drop(captured, manifest.tensors)
        self._dropped = dropped, manifest
        return dropped.num_bytes

    def refill(self) -> None:
        """Read it back into place. Training thread; waits for no other rank.

        Raises:
            UnusableSnapshot: the snapshot is damaged, or not what was in memory.
            TierUnavailable: the run's place refused.
        """
        self._prepared = None
        if self._dropped is not None and self._dropped[0].wanted:
            dropped, manifest = self._dropped
            destination = dropped.destination()
            Reader(self._tier, manifest).read(dropped.wanted, destination, donor=self._rank)
            destination.finish({})
            dropped.filled()
        self._dropped = None

    def make_buckets(self) -> None:
        """Those of DDP. Collective: nobody may be missing, so all say first that they refilled."""
        while self._buckets:
            self._buckets.pop(0)()
