"""Protecting: one rank's saver and what other hosts keep for it (`protection`), or memory alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed
from trainckpt.format.names import shard_file_name
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.pending import NO_PARTNER
from trainckpt.lifecycle.saving.kept_again import KeptAgain, StoredSnapshot
from trainckpt.lifecycle.saving.protection import Unprotected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.run.pending import PendingSave
    from trainckpt.lifecycle.saving.arenas import Arenas
    from trainckpt.lifecycle.saving.protection import Protection
    from trainckpt.state.stage import Shard, Stream
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.base import Tier

AGAIN_S = 2.0  # whoever leaves waits so long for what is kept again


class Protecting:
    """One rank's saver and its protection, where there is one.

    Attributes:
        protection: None: nothing was asked for.
        seconds: How long it took others to keep the last save; None: they have kept none.
        on_this_host: Makes one by which others keep nothing.
        again: Has others keep what the attempt began from; None: nothing to do, or done with.
    """

    protection: Protection | None = None
    seconds: float | None = None
    on_this_host: Callable[[], Protection] | None = None
    again: KeptAgain | None = None

    def __init__(self, arenas: Arenas, rank: int) -> None:
        self._arenas, self._rank = arenas, rank
        self._failures = 0
        self._has_looked = False
        self._before: tuple[Protection | None] | None = None  # what a last save has replaced

    def begin_from(self, tiers: Sequence[Tier], manifest: Manifest) -> None:
        """Have others keep, beside training, what they do not hold any more of this snapshot.

        All ranks alike, once. Of as many ranks as there are now: else nobody's file is whose.

        Args:
            tiers: That hold it, nearest first.
            manifest: Of what the attempt began from.
        """
        protection = self.protection
        if protection is None or not protection.plan.num_losses:
            return
        if manifest.world != protection.num_ranks:
            return
        snapshot = StoredSnapshot(
            tiers, manifest.run, manifest.name, self._rank,
            lambda num_bytes: self._arenas.leave_room(num_bytes, 0),
        )  # fmt: skip
        protection.newest = manifest.name.folder
        self.again = KeptAgain(protection, snapshot, says=self._rank == 0)
        self.again.start()

    def _end_again(self, limit_s: float | None = None) -> bool:
        """Something newer is to be kept. Whether nothing else uses the network any more."""
        if self.again is not None and not self.again.end(limit_s):
            return False
        self.again = None
        return True

    def lets_go(self) -> bool:
        """The next shard is to be staged. Whether nobody reads what it would be written over."""
        return self._arenas.are_two or self._end_again(AGAIN_S)

    @property
    def num_losses(self) -> int:
        """How many failure domains may be lost at once with what others keep."""
        return self.protection.plan.num_losses if self.protection is not None else 0

    def give_way(self) -> None:
        """A last save comes. All ranks alike."""
        if self.protection is not None:
            self.protection.give_way()

    def take_way(self) -> None:
        """It was not the last one after all: others keep again what they did before. All ranks
        alike, at a boundary, no save in flight.
        """
        self._has_looked = False
        if self._before is not None:
            (before,), here = self._before, self.protection
            self._before = None
            if here is not None:
                here.close(keep=True)  # first: closing gives up locks
                if before is not None:
                    before.newest = here.newest
            self.protection = before
        if self.protection is not None:
            self.protection.take_way()

    def room(self, num_bytes: int, *, in_memory: bool) -> Arena | None:
        """Memory for this rank's encrypted file, if anybody is to keep it; None: there is none."""
        protection = self.protection
        if protection is None or not (in_memory or protection.plan.num_losses):
            return None
        if in_memory and not self._has_looked and not self.has_room(num_bytes, in_budget=False):
            return None
        return protection.room(num_bytes)

    def has_room(self, num_bytes: int, *, in_budget: bool = True) -> bool:
        """Whether this rank's encrypted file may be brought into memory, beside its own.

        Args:
            num_bytes: Of the file.
            in_budget: `memory_budget` holds for it: `memory_every` did not ask for it.
        """
        spare, taken = self.protection.sealed_bytes() if self.protection is not None else (0, 0)
        more = num_bytes - spare
        return more <= 0 or self._arenas.leave_room(more, taken if in_budget else None)

    def prepare_last(self, *, others: bool) -> None:
        """The save that ends the attempt stays in memory; every rank alike, no save in flight.

        Args:
            others: Other hosts are to keep it as well.
        """
        if not others and self.on_this_host is not None:
            self._keep_here(self.on_this_host)
        self._has_looked = True  # each rank has offered its memory (`has_room`), before any took it
        if self.protection is not None:
            self.protection.take_way()

    def _keep_here(self, on_this_host: Callable[[], Protection]) -> None:
        """Nobody else is to keep anything. What is kept so far stands until there is newer."""
        old = self.protection
        if old is not None and not (old.plan.num_losses or old.is_cut_off):
            return
        ended = self._end_again(AGAIN_S)
        if old is not None and ended:  # before the new one opens anything: closing gives up locks
            old.close(keep=True)
        self._before = (old,)
        self.protection = on_this_host()
        self.protection.newest = old.newest if old is not None else None

    def protect(
        self,
        name: SnapshotName,
        whole: Manifest | None,
        shard: Shard | Stream,
        pending: PendingSave,
    ) -> None:
        """Have other hosts keep what was committed."""
        self._end_again()
        why = NO_PARTNER
        if self.protection is not None and self.protection.plan.num_losses:
            why = self._try(self.protection, name, whole, shard)
        pending.protect(why)

    def keep(
        self,
        name: SnapshotName,
        whole: Manifest | None,
        shard: Shard | Stream,
        pending: PendingSave,
    ) -> None:
        """Keep in memory what is written nowhere else."""
        assert self.protection is not None
        if self.protection.plan.num_losses:
            self._end_again()
        before = self._arenas.newest
        self._arenas.publish(name, shard_file_name(self._rank))
        safe = shard if self._arenas.keep or self.protection.has_sealed else None
        if why := self._try(self.protection, name, whole, safe):
            self._arenas.newest = before
            pending.fail(SaveFailed(why))
        else:
            pending.protect()

    @property
    def is_cut_off(self) -> bool:
        """Whether a rank is gone that others are to keep things with."""
        return self.protection is not None and self.protection.is_cut_off

    def close(self, *, keep: bool) -> None:
        """The attempt is over; `keep` what is held for others."""
        if not self._end_again(AGAIN_S):
            return  # it hangs on a rank that is gone, and ends with this process
        if self.protection is not None:
            self.protection.close(keep=keep)

    def _try(
        self, protection: Protection, name: SnapshotName, whole: Manifest | None,
        shard: Shard | Stream | None,
    ) -> str:  # fmt: skip
        """Why it failed, or ""."""
        begun_s = time.monotonic()
        try:
            protection.protect(name, whole, getattr(shard, "memory", None))
        except Unprotected as unprotected:
            self._failures += not protection.gives_way
            if protection.gives_way:
                logger.debug("other hosts do not hold %s: %s", name, unprotected)
            elif self._rank == 0 and (self._failures == 1 or self._failures % 10 == 0):
                logger.warning("other hosts do not hold %s: %s (%d so far)", name, unprotected,
                               self._failures)  # fmt: skip
            return str(unprotected)
        except Exception as error:  # noqa: BLE001 - the save stands, and training goes on
            logger.warning("other hosts do not hold %s: %r", name, error)
            return repr(error)
        self.seconds = time.monotonic() - begun_s if protection.plan.num_losses else None
        return ""
