"""Drop the memory that a snapshot holds before a dump; read it back and verify it after.

A plain dump of a training is mostly parameters, gradients and optimizer state, which were written a
moment ago. Without them it is about as large as that of a small model, and sooner done. Such a dump
is usable only as long as the snapshot exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import catalog
from trainckpt.snapshot.restore import Reader
from trainckpt.state import memory_discard
from trainckpt.state.adapters import ddp
from trainckpt.state.capture import capture

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.world import World
    from trainckpt.state.captured import Captured
    from trainckpt.state.memory_discard import DroppedMemory
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Readable


class LeanDump:
    """Memory of one rank around a dump.

    Sequence of calls: `prepare`, `drop` once all ranks have prepared, `refill`, `make_buckets` once
    all ranks have refilled. The last two may be called at any time: they undo the earlier calls.
    """

    def __init__(
        self,
        tier: Readable,
        run: str,
        world: World,
        registry: Registry,
        unused: Callable[[], memoryview],
    ) -> None:
        """`unused`: releases resources that only saves need; returns memory without contents to
        keep."""
        self._tier, self._run, self._rank, self._world = tier, run, world.rank, world.size
        self._registry, self._unused = registry, unused
        self._prepared: tuple[Captured, Manifest] | None = None
        self._dropped: tuple[DroppedMemory, Manifest] | None = None
        self._buckets: list[Callable[[], None]] = []

    @property
    def is_whole(self) -> bool:
        """Return True if nothing has to be undone."""
        return self._dropped is None and not self._buckets

    def prepare(self, snapshot: str) -> None:
        """Find the memory that the snapshot holds. Every rank, training thread.

        Raises:
            UnusableSnapshot: it cannot be read.
        """
        name = SnapshotName.parse(snapshot)
        if name is None:
            raise UnusableSnapshot(f"{snapshot[:60]} names no snapshot")
        captured = capture(self._registry)  # collective, so before any step that may fail
        manifest = catalog.load_manifest(self._tier, self._run, name)
        if manifest.world == self._world:  # else each rank holds parts saved by several
            self._prepared = captured, manifest

    def drop(self) -> int:
        """Free the prepared memory. Every rank, or `make_buckets` waits for the missing ones.

        Returns:
            The number of bytes freed.
        """
        if self._prepared is None:
            return 0
        (captured, manifest), self._prepared = self._prepared, None
        wrappers = dict.fromkeys(model.reducing for model in self._registry.models)
        for wrapper in wrappers:  # first: making them again is collective
            make = ddp.let_go_of_buckets(wrapper)
            self._buckets += [make] if make is not None else []
        memory_discard.discard(self._unused())
        dropped = memory_discard.drop(captured, manifest.tensors)
        self._dropped = dropped, manifest
        return dropped.num_bytes

    def refill(self) -> None:
        """Read the memory back into place. Training thread; waits for no other rank.

        Raises:
            UnusableSnapshot: the snapshot is damaged, or differs from the old contents of memory.
            TierUnavailable: the run directory refused.
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
        """Make DDP's buckets again. Collective, so all ranks first report their refill."""
        while self._buckets:
            self._buckets.pop(0)()
