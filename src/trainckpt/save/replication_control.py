"""Control replication per save: connect one rank's saver to its `Replicator`, if it has one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.attempt.save_handle import NO_PARTNER
from trainckpt.errors import SaveFailed
from trainckpt.format.names import shard_file_name
from trainckpt.replicate.replicator import ReplicationFailed
from trainckpt.replicate.rereplicate import Rereplication, StoredSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.save_handle import CommitEvent, SaveHandle
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.replicate.replicator import Replicator
    from trainckpt.save.arenas import Arenas
    from trainckpt.state.staging import Shard, StreamedShard
    from trainckpt.storage.arena import Arena
    from trainckpt.storage.base import Tier

AGAIN_S = 2.0  # time for a re-replication to end, before it is left behind


class ReplicationControl:
    """One rank's saver and its replicator, where there is one.

    Attributes:
        replicator: None: no replication was requested.
        seconds: Duration of the last replication; None: there was none.
        rereplication: Replication of the snapshot the attempt began from; None: nothing to do, or
            over.
    """

    def __init__(
        self,
        arenas: Arenas,
        rank: int,
        replicator: Replicator | None,
        make_local: Callable[[], Replicator] | None,
    ) -> None:
        """`make_local`: makes a replicator without other hosts; None: there is none."""
        self.replicator = replicator
        self.seconds: float | None = None
        self.rereplication: Rereplication | None = None
        self._make_local = make_local
        self._arenas, self._rank = arenas, rank
        self._failures = 0
        self._has_checked_room = False
        self._replaced: tuple[Replicator | None] | None = None  # replaced by a final save

    def begin_from(self, tiers: Sequence[Tier], manifest: Manifest) -> None:
        """Replicate, beside training, the parts of this snapshot that other hosts have lost.

        All ranks alike, once. Does nothing if the number of ranks has changed: files then have no
        owner.

        Args:
            tiers: Tiers that hold the snapshot, nearest first.
            manifest: Manifest of the snapshot from which the attempt began.
        """
        replicator = self.replicator
        if replicator is None or not replicator.plan.num_losses:
            return
        if manifest.world != replicator.num_ranks:
            return
        snapshot = StoredSnapshot(
            tiers,
            manifest.run,
            manifest.name,
            self._rank,
            lambda num_bytes: self._arenas.has_room(num_bytes, 0),
        )
        replicator.newest = manifest.name.folder
        self.rereplication = Rereplication(replicator, snapshot, says=self._rank == 0)
        self.rereplication.start()

    def _end_rereplication(self, limit_s: float | None = None) -> bool:
        """End the re-replication. Return True if nothing else uses the network any more."""
        if self.rereplication is not None and not self.rereplication.end(limit_s):
            return False
        self.rereplication = None
        return True

    def can_reuse_arena(self) -> bool:
        """Return True if the arena about to be reused has no readers."""
        return self._arenas.are_double or self._end_rereplication(AGAIN_S)

    @property
    def num_losses(self) -> int:
        """Number of failure domains that may be lost at once."""
        return self.replicator.plan.num_losses if self.replicator is not None else 0

    def pause(self) -> None:
        """Yield the network to a final save. All ranks alike."""
        if self.replicator is not None:
            self.replicator.pause()

    def unpause(self) -> None:
        """Replicate again as before, since the final save was not the final one after all.

        All ranks alike, at a boundary, no save in flight.
        """
        self._has_checked_room = False
        if self._replaced is not None:
            (before,), current = self._replaced, self.replicator
            self._replaced = None
            if current is not None:
                current.close(keep=True)  # first: closing releases locks
                if before is not None:
                    before.newest = current.newest
            self.replicator = before
        if self.replicator is not None:
            self.replicator.unpause()

    def reserve(self, num_bytes: int, *, in_memory: bool) -> Arena | None:
        """Return memory for this rank's encrypted file; None: no memory, or no replication."""
        replicator = self.replicator
        if replicator is None or not (in_memory or replicator.plan.num_losses):
            return None
        if (
            in_memory
            and not self._has_checked_room
            and not self.has_room(num_bytes, in_budget=False)
        ):
            return None
        return replicator.reserve_encrypted(num_bytes)

    def has_room(self, num_bytes: int, *, in_budget: bool = True) -> bool:
        """Return True if this rank's encrypted file fits in memory, beside its plain file.

        Args:
            num_bytes: Size of the file.
            in_budget: Respect `memory_budget`: the save is not one of `memory_every`.
        """
        spare, taken = self.replicator.encrypted_bytes() if self.replicator is not None else (0, 0)
        more = num_bytes - spare
        return more <= 0 or self._arenas.has_room(more, taken if in_budget else None)

    def prepare_final(self, *, others: bool) -> None:
        """Prepare a final save that stays in memory. Every rank alike, no save in flight.

        Args:
            others: Other hosts hold it as well.
        """
        if not others and self._make_local is not None:
            self._switch_to_local(self._make_local)
        # each rank has checked its memory (`has_room`), before any uses it
        self._has_checked_room = True
        if self.replicator is not None:
            self.replicator.unpause()

    def _switch_to_local(self, on_this_host: Callable[[], Replicator]) -> None:
        """Switch to a replicator without other hosts. Older replicas stand until there is newer."""
        old = self.replicator
        if old is not None and not (old.plan.num_losses or old.is_cut_off):
            return
        ended = self._end_rereplication(AGAIN_S)
        if old is not None and ended:  # before the new one opens anything: closing releases locks
            old.close(keep=True)
        self._replaced = (old,)
        self.replicator = on_this_host()
        self.replicator.newest = old.newest if old is not None else None

    def on_commit(self, event: CommitEvent) -> None:
        """Replicate a committed snapshot to other hosts, unless the attempt ends with it."""
        if event.is_final:
            event.handle.set_replicated("the attempt ended with this committed save")
            return
        try:
            failure = self._replicate_commit(event)
        except Exception as error:
            event.handle.set_replicated(str(error) or repr(error))  # a caller may wait for it
            raise
        event.handle.set_replicated(failure)

    def _replicate_commit(self, event: CommitEvent) -> str:
        """Return the reason why no other host holds the snapshot; "" if one does."""
        self._end_rereplication()
        if self.replicator is None or not self.replicator.plan.num_losses:
            return NO_PARTNER
        return self._replicate(self.replicator, event.manifest.name, event.whole, event.shard)

    def keep_in_memory(
        self,
        name: SnapshotName,
        whole: Manifest | None,
        shard: Shard | StreamedShard,
        handle: SaveHandle,
    ) -> None:
        """Keep in memory a snapshot that is written nowhere else."""
        assert self.replicator is not None
        if self.replicator.plan.num_losses:
            self._end_rereplication()
        before = self._arenas.newest
        self._arenas.publish(name, shard_file_name(self._rank))
        stored = shard if self._arenas.outlive_process or self.replicator.has_encrypted else None
        if failure := self._replicate(self.replicator, name, whole, stored):
            self._arenas.prefer(before)
            handle.fail(SaveFailed(failure))
        else:
            handle.set_replicated()

    @property
    def is_cut_off(self) -> bool:
        """True if a rank that takes part in the replication is gone."""
        return self.replicator is not None and self.replicator.is_cut_off

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep` the replicas held for other ranks."""
        if not self._end_rereplication(AGAIN_S):
            return  # it waits for a rank that is gone, and ends with this process
        if self.replicator is not None:
            self.replicator.close(keep=keep)

    def _replicate(
        self,
        replicator: Replicator,
        name: SnapshotName,
        whole: Manifest | None,
        shard: Shard | StreamedShard | None,
    ) -> str:
        """Replicate; return why it failed, or ""."""
        begun_s = time.monotonic()
        try:
            replicator.replicate(name, whole, getattr(shard, "memory", None))
        except ReplicationFailed as error:
            self._failures += not replicator.is_paused
            if replicator.is_paused:
                logger.debug("%s was not replicated to other hosts: %s", name, error)
            elif self._rank == 0 and (self._failures == 1 or self._failures % 10 == 0):
                logger.warning(
                    "%s was not replicated to other hosts: %s (%d so far)",
                    name,
                    error,
                    self._failures,
                )
            return str(error)
        except Exception as error:  # noqa: BLE001 - the save stands, and training goes on
            logger.warning("%s was not replicated to other hosts: %r", name, error)
            return repr(error)
        self.seconds = time.monotonic() - begun_s if replicator.plan.num_losses else None
        return ""
