"""Replicate again, after a resume, the snapshot from which the attempt began.

A replaced host holds nothing, and a rebuilt file lies on one host alone. The next save would mend
that; until then another loss could take the snapshot. So a thread of every rank, beside training:

    1  checks this host's memory for missing or bad files, by the redundancy plan
       BARRIER  as a rule no rank lacks anything: that is all
    2  provides its own file: from this host's memory, else from the nearest tier
    3  passes copies or parities, as after a save (`Replicator`)

Files pass as they are stored: encrypted files stay so. They are verified before and after. The next
save ends the work, since it is newer; with one arena, before it is staged there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.digest_check import is_file
from trainckpt.ranks import threads
from trainckpt.replicate import replicator
from trainckpt.replicate.replicator import ReplicationFailed
from trainckpt.snapshot import catalog
from trainckpt.snapshot.verify import read_parity
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import SharedMemoryDir
from trainckpt.storage.tiered_reader import TieredReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.replicate.replicator import Replicator
    from trainckpt.storage.base import Tier

PART_BYTES = 8 << 20


class StoredSnapshot:
    """One rank's view of a committed snapshot with as many ranks as the attempt.

    Attributes:
        name: Name of the snapshot.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        run: str,
        name: SnapshotName,
        rank: int,
        has_room: Callable[[int], bool],
    ) -> None:
        """`has_room`: returns True if so many bytes of memory may be used for this rank's file."""
        self.name = name
        self._ladder, self._run, self._rank = TieredReader(tiers), run, rank
        self._memory_dir = SharedMemoryDir.of(tiers[0].url)
        self._has_room = has_room

    def manifest(self) -> Manifest:
        """Return the manifest as it is stored: the same bytes on every host."""
        return catalog.load_manifest(self._ladder, self._run, self.name)

    def is_incomplete(self, manifest: Manifest, names: set[str]) -> bool:
        """Return True if any of these files is missing or bad in this host's memory."""
        if self._memory_dir is None:
            return True
        name_of = replicator.file_name(manifest)
        files = {name_of(rank): file for rank, file in enumerate(manifest.files)}
        present = set(replica_slots.files(self._memory_dir, self.name.folder))
        return not (names <= present and all(self._is_good(n, files) for n in sorted(names)))

    def _is_good(self, name: str, files: Mapping[str, FileEntry]) -> bool:
        mapping = (
            None if self._memory_dir is None else self._memory_dir.held(self.name.folder, name)
        )
        if mapping is None or name == replica_slots.MANIFEST:
            return mapping is not None
        with contextlib.closing(mapping):
            if name in files:
                return is_file(mapping.data[: files[name].num_bytes], files[name])
            try:
                read_parity(mapping.data, name)
            except UnusableSnapshot:
                return False
        return True

    @contextlib.contextmanager
    def file(self, manifest: Manifest, may_go_on: Callable[[], None]) -> Iterator[memoryview]:
        """Provide this rank's file, under its name in this host's memory.

        Args:
            manifest: Manifest of the snapshot.
            may_go_on: Raises if the file is not wanted any more; called while it is fetched.

        Raises:
            UnusableSnapshot: the file does not match the manifest.
            TrainckptError, OSError: it cannot be read, or there is no memory for it.
        """
        file, file_name = manifest.files[self._rank], replicator.file_name(manifest)(self._rank)
        if self._memory_dir is None:
            raise OSError("there is no shared memory")
        mapping = self._memory_dir.held(self.name.folder, file_name, file.num_bytes)
        if mapping is None or not is_file(mapping.data, file):
            self._fetch(file, file_name, may_go_on)
            mapping = self._memory_dir.held(self.name.folder, file_name, file.num_bytes)
        if mapping is None:
            raise OSError(f"{file_name} is no longer in memory")
        try:
            yield mapping.data
            if not is_file(mapping.data, file):
                raise UnusableSnapshot(f"a newer save has overwritten {file_name}")
        finally:
            mapping.close()

    def _fetch(self, file: FileEntry, file_name: str, may_go_on: Callable[[], None]) -> None:
        """Read the file into memory that no save uses, until the next snapshot is replicated."""
        assert self._memory_dir is not None
        if not self._has_room(file.num_bytes):
            raise OSError(f"too little memory for {file_name}")
        name, key = replica_slots.fetched_slot(self._rank), f"{self.name.folder}/{file.name}"
        replica_slots.remove_slot(self._memory_dir, name)
        path = replica_slots.arena_path(self._memory_dir, name, 0)
        with contextlib.closing(self._memory_dir.open_arena(path)) as arena:
            arena.reserve(file.num_bytes)
            is_good, self._ladder.sizes = False, {key: file.num_bytes}
            steps = range(0, file.num_bytes, PART_BYTES)
            parts = [(at, arena.memory[at : at + PART_BYTES]) for at in steps]
            try:
                self._ladder.read_parts(key, parts, lambda _: may_go_on())
                is_good = is_file(arena.memory, file)
            finally:
                if not is_good:
                    arena.empty()
            if not is_good:
                raise UnusableSnapshot(f"{key} does not match its digest")
            arena.publish(self.name.folder, file_name)


class Rereplication:
    """Thread of one rank that replicates a stored snapshot. Sequence of calls: `start`, `end`."""

    def __init__(self, protection: Replicator, snapshot: StoredSnapshot, *, says: bool) -> None:
        """`says`: log for all ranks."""
        self._protection, self._snapshot, self._logs = protection, snapshot, says
        self._thread = threads.thread(self._run, "trainckpt-again")

    def start(self) -> None:
        """Start the thread. All ranks, before anything newer is replicated."""
        self._thread.start()

    def join(self, limit_s: float | None = None) -> bool:
        """Return True if the thread has ended within so many seconds."""
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def end(self, limit_s: float | None = None) -> bool:
        """Stop, since all ranks come to a newer snapshot. Return True if it ended in time."""
        self._protection.supersede(over=False)
        if not self.join(limit_s):
            return False
        self._protection.supersede(over=True)
        return True

    def _run(self) -> None:
        name = self._snapshot.name
        try:
            lacking = self._protection.replicate_stored(self._snapshot)
        except ReplicationFailed as why:
            if self._logs and not self._protection.is_paused:
                logger.debug("%s is not replicated again, the next save will be: %s", name, why)
        except (TrainckptError, OSError) as error:
            logger.warning("could not replicate %s again: %s", name, error)
        except Exception as error:  # noqa: BLE001 - training goes on
            logger.warning("could not replicate %s again: %r", name, error)
        else:
            if lacking and self._logs:
                logger.debug(
                    "%s is replicated again: %d of its %d ranks had lost copies",
                    name,
                    lacking,
                    self._protection.num_ranks,
                )
