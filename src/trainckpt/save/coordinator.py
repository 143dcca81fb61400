"""The save coordinator: takes one snapshot at a time, on all ranks together.

    training thread, at a boundary               saving thread, training goes on
    1  wait for the save in flight, if any        5  write the shard file, fsync        (every rank)
    2  capture; agree which groups are shared     6  report its receipt                 (every rank)
    3  plan the regions this rank stores, and     7  commit when all have reported      (rank 0)
       those that an older file holds already
    4  copy the rest into one shard: "staged"     8  publish the verdict; prune         (rank 0)
       (the saving thread may copy a part beside training: `copying`)

All ranks take the same saves in the same order, since each is requested at a boundary that all
agreed on. A rank that fails reports it in 2 or 6, and then no snapshot commits: training goes on,
the failure is logged, older snapshots stand.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.attempt.live_status import SavingNow
from trainckpt.attempt.log import logger
from trainckpt.attempt.save_handle import (
    COMMITTED,
    PARTNER,
    CommitEvent,
    SaveHandle,
    SaveStages,
)
from trainckpt.encryption.encrypted_file import EncryptedLayout
from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.format.manifest import Manifest
from trainckpt.format.names import VERSION, SnapshotName
from trainckpt.format.save_history import FAILED, SKIPPED, SaveRow
from trainckpt.gc_pause import gc_paused
from trainckpt.preemption.signal_source import raised_by_handler
from trainckpt.ranks import threads
from trainckpt.ranks.store import RANKS_TIMEOUT_S, collective_timeout_s
from trainckpt.save.arenas import SPARE_BYTES, ArenaUnavailable
from trainckpt.save.checks import StaleModelCheck, TrackedNamesCheck
from trainckpt.save.committer import ManifestDefaults, SnapshotCommitter, groups_key, kind_of
from trainckpt.save.copying import StateCopier
from trainckpt.save.deduplication import (
    IncrementalIndex,
    ReplicaCheck,
    SavePlanCache,
    combine_answers,
)
from trainckpt.save.estimates import shard_bytes, weigh
from trainckpt.state import staging
from trainckpt.state.capture import capture
from trainckpt.state.overlapped_copy import only_stepped

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import TensorEntry
    from trainckpt.format.shard_file import Region
    from trainckpt.ranks.store import RankStore
    from trainckpt.replicate.uploads import Uploads
    from trainckpt.save.arenas import Arenas
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.save.estimates import Timings
    from trainckpt.save.replication_control import ReplicationControl
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

NEARLY_S, PATIENCE_S = 1.0, 10.0  # a save expected this soon is waited for so long, once
REPORT_EVERY_S = 60.0  # saves closer together than this are logged at debug level
HOLD_S = 60.0  # a step waits so long until other hosts hold the state before it
# The interpreter runs one thread for 5 ms while others wait: the saving thread lets the training
# thread leave the boundary first.
YIELD_S = 0.001


class _Skipped(Exception):
    """All ranks skip this save."""


class _Staged(NamedTuple):
    """This rank's state at a boundary, staged for the saving thread."""

    captured: Captured  # the live state
    shard: staging.Shard | staging.StreamedShard
    entries: dict[str, TensorEntry]  # every tensor of this rank, for the manifest
    attempt: int  # as the ranks agreed
    num_bytes: int  # of the whole state, not of this rank's part


@dataclass(kw_only=True)
class _SaveInFlight:
    """One save, from its boundary to its commit."""

    manifest: Manifest  # without files and tensors: the committer adds those of all ranks
    staged: _Staged | None  # None once the saving thread has taken it
    handle: SaveHandle
    begun_s: float  # monotonic
    num_bytes: int  # of the whole state
    file_bytes: int  # of this rank's file
    in_memory: bool  # kept in the hosts' memory, and written nowhere else
    is_final: bool  # the attempt ends with it
    stall_s: float | None = None  # training waited so long, also for the save before
    memory_s: float | None = None  # from its beginning until shared memory held all


class SaveCoordinator:
    """Takes the snapshots of one attempt.

    Attributes:
        committed: Full name and cursor of the newest snapshot this attempt committed.
        pinned: Rank 0: full names that checkpoints of a framework refer to; they are not pruned.
        skipped: Saves that all ranks skipped, since one before was still being written.
        failed: Saves that failed.
        failed_by_kind: Their numbers by the kind of the reason, as in `SaveFailed.kind`.
        failures: Saves that failed since the last one that committed.
        created: When the newest committed snapshot was taken, by the wall clock; None: none was.
        written_bytes: Rank 0: bytes of all files committed in the run directory.
        saves: What became of them all.
        sequence: Number of the last save that was begun.
        references: Regions of this rank that need not be written.
        uploads: Uploads committed snapshots to slower tiers.
        replication: Replicates this rank's files to other hosts.
    """

    def __init__(
        self,
        *,
        tier: Tier,
        channel: RankStore,
        registry: Registry,
        defaults: ManifestDefaults,
        record_writer: RecordWriter,
        timings: Timings,
        arenas: Arenas,
        window_start: Callable[[], Cursor],
        encryption: SnapshotEncryption | None,
        uploads: Uploads,
        replication: ReplicationControl,
        saves_gradients: Callable[[], bool],
        blocks_step: bool,
    ) -> None:
        """Store the arguments; one connection to the store is opened.

        Args:
            tier, channel, registry, defaults, record_writer, timings, arenas: Of the attempt.
            window_start: Returns the cursor at the beginning of the open window.
            encryption: Encrypts every file; None: nothing is encrypted.
            uploads, replication: Of the attempt; they may have nothing to do.
            saves_gradients: Returns True if saves without a stop may fall amid a window.
            blocks_step: A step waits until other hosts hold the state before it, so that at most
                one is lost. For saves to memory at every step.
        """
        self.committed: tuple[str, Cursor] | None = None
        self.pinned: frozenset[str] = frozenset()
        self.skipped = self.failed = self.failures = self.written_bytes = 0
        self.failed_by_kind = Counter[str]()
        self.created: float | None = None
        self.arenas = arenas
        self.uploads, self.replication = uploads, replication
        self._blocks_step = blocks_step
        self._channel = channel
        self._copier = StateCopier(
            registry,
            prepare=self._prepare,
            before_step=self._before_step,
            on_wait=self._record_wait,
            num_threads=arenas.copy_threads,
            device_copier=arenas.device_copier,
        )
        self.references = IncrementalIndex(tier, channel.world.rank, registry)
        self._committer = SnapshotCommitter(
            tier=tier,
            channel=channel,
            files=registry.files,
            defaults=defaults,
            record_writer=record_writer,
            references=self.references,
            being_read=lambda: {*self.uploads.busy, *self.pinned},
            encryption=encryption,
            room=self.replication.reserve,
        )
        self._is_encrypted, self.saves = encryption is not None, record_writer.saves
        self._tracked_names, self._stale_models = (
            TrackedNamesCheck(registry),
            StaleModelCheck(registry),
        )
        self._registry, self._defaults, self._timings = registry, defaults, timings
        self._window_start, self._saves_gradients = window_start, saves_gradients
        self._plan_cache = SavePlanCache(registry, channel.world.rank, channel.world.size)
        self._staging_cache = staging.StagingCache()
        self._replica_check = ReplicaCheck(channel.world.rank, channel.world.size)
        self.sequence = 0
        self._save: _SaveInFlight | None = None  # the one being written, or the last one
        self._report_from_s = 0.0  # monotonic; saves before it are logged at debug level
        self._cut_off = False  # the last save found a rank gone
        self._may_wait = True  # the last wait for a save was not in vain
        self._thread: threading.Thread | None = None
        self._commit_subscribers: tuple[Callable[[CommitEvent], object], ...] = (
            # a waiting caller may save or resume at once: the next save refers to these regions,
            # `committed` names the snapshot, and memory holds it
            self.references.on_commit,
            self._count_commit,
            self._stale_models.on_commit,
            arenas.on_commit,
            timings.on_commit,
            self._report_commit,  # from here on a waiting caller goes on
            self.uploads.on_commit,  # before the pruning, which spares the snapshots queued here
            self._committer.on_commit,
            self.replication.on_commit,  # last: it sends to other hosts, and waits for them
        )

    def save(
        self,
        cursor: Cursor,
        reason: str,
        tags: tuple[str, ...],
        handle: SaveHandle,
        *,
        final: bool = False,
        may_skip: bool = False,
        in_memory: bool = False,
    ) -> SaveHandle:
        """Take a snapshot now. Every rank calls it at the same boundary.

        Returns when the state is staged, or the save has failed. A failed save raises nothing,
        except an exception raised meanwhile by the script's signal handler.

        Args:
            cursor, reason, tags: For the manifest.
            handle: Handle to resolve.
            final: Nothing need be copied: the caller changes nothing before `wait` or `abandon`.
            may_skip: All ranks skip the save if on any rank the one before is far from written. One
                that a caller may wait for is deferred instead.
            in_memory: Keep it in the hosts' memory, and write nothing to the run directory.
        """
        asked_s = time.monotonic()
        behind = may_skip and self._is_behind(PATIENCE_S if handle.is_requested else NEARLY_S)
        if not behind:
            self.join()
            self._committer.begin()
        begun_s = time.monotonic()
        self.sequence += 1
        name = SnapshotName(self._defaults.attempt, self.sequence, cursor.step, cursor.micro)
        try:
            with self._registry.unchanged(), gc_paused():
                self._tracked_names.check()
                self._stale_models.note(cursor.step)
                staged = self._stage(cursor, final=final, behind=behind, in_memory=in_memory)
        except _Skipped as skipped:
            if handle.is_requested:
                handle.defer(str(skipped))
            else:
                self._skip(handle, name, str(skipped))
            return handle
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._committer.send(
                name.sequence, {"error": f"rank {self._channel.world.rank}: {error}"}
            )
            self._record_failure(
                handle,
                name,
                SaveFailed(
                    f"the state could not be captured: {error}",
                    kind=kind if (kind := kind_of(error)) != "other" else "state",
                ),
            )
            if alarm := raised_by_handler(error):
                raise alarm from None
            return handle
        name = replace(name, attempt=staged.attempt)
        manifest = Manifest(
            run=self._defaults.run,
            name=name,
            parent=self._defaults.parent,
            cursor=cursor,
            world=self._channel.world.size,
            files=(),
            tensors={},
            created=time.time(),
            tags=tags,
            reason=reason,
            fingerprint=self._defaults.fingerprint,
            writer=f"trainckpt {VERSION}",
            window=self._window_start(),
        )
        self._save = save = _SaveInFlight(
            manifest=manifest,
            staged=staged,
            handle=handle,
            begun_s=begun_s,
            num_bytes=staged.num_bytes,
            file_bytes=staged.shard.header.header_bytes + staged.shard.header.data_bytes,
            in_memory=in_memory,
            is_final=final,
        )
        handle.stage(str(name), self._copier.wait)
        self._thread = threads.thread(self._write, "trainckpt-save", save)
        self._thread.start()
        if isinstance(staged.shard, staging.StreamedShard) and not final:
            staged.shard.is_read.wait()  # no memory for a copy: the tensors must not change
        now_s = time.monotonic()
        save.stall_s = now_s - asked_s
        self._timings.record_stall(now_s - begun_s)
        return handle

    def join(self, limit_s: float | None = None) -> None:
        """Return when no save is in flight, or after `limit_s` seconds. Training thread.

        If its copies are not made in time, it may take twice as long.
        """
        self._copier.wait(limit_s)
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None

    def wait(self, limit_s: float | None = None) -> None:
        """Wait as `join`; then until older saves are pruned, or for `limit_s` more."""
        self.join(limit_s)
        self.wait_for_retention(limit_s)

    def prune(self) -> None:
        """Prune as after a commit, in an attempt that ends without one. Rank 0; returns at once."""
        if self.committed is None:
            self._committer.retention.schedule(None)

    def wait_for_retention(self, limit_s: float | None) -> None:
        """Return when older saves are pruned, or after `limit_s` seconds."""
        self._committer.retention.wait(limit_s)

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep` shared memory for the next one."""
        self._copier.close()
        if not self.busy:
            self.replication.close(keep=keep)
            self.arenas.close(keep=keep)
            self._committer.close(keep=keep)

    def release_memory(self) -> memoryview:
        """Pause: no save comes for a while. Returns memory without contents of value."""
        self._committer.stop_client()
        return self.arenas.release_private()

    def abandon(self) -> None:
        """Abandon the save in flight, unless all is written already."""
        self._committer.abandon()

    @property
    def has_room(self) -> bool:
        """True if a final save may stay in memory. An encrypted one lies there twice."""
        num_bytes = shard_bytes(self._registry, self._channel.world.size)
        num_bytes += weigh(self._registry, gradients=True, own_part=True).gradients
        stored_bytes = EncryptedLayout(SPARE_BYTES, num_bytes).stored_bytes
        return not self._is_encrypted or self.replication.has_room(stored_bytes)

    @property
    def in_flight(self) -> SaveHandle | None:
        """Handle of the save that is being written, or of the last one."""
        return self._save.handle if self._save is not None else None

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _holds_step(self) -> bool:
        """True if the next step waits until other hosts hold the newest save."""
        return self._blocks_step and self._save is not None and self._save.in_memory

    def _before_step(self) -> None:
        """Wait, before a step, until the save in flight has come to its end.

        The rank has trained with all others, so all have begun that save, and each comes to its
        end. If one of them is gone, no other rank trains on with it, and the step would only be
        lost.
        """
        if not self._holds_step:
            return
        begun_s = time.monotonic()
        self.join(HOLD_S)
        self._timings.record_wait(begun_s)
        if self._cut_off:
            self._blocks_step = False
            logger.warning(
                "another rank is gone: rank %d waits, since no other host could hold its next step",
                self._channel.world.rank,
            )
            time.sleep(HOLD_S)  # the supervisor or launcher ends this process meanwhile

    def _record_wait(self, begun_s: float) -> None:
        """Record that a step has waited for the copies of the save in flight."""
        self._timings.record_wait(begun_s)
        if self._save is not None and self._save.stall_s is not None:
            self._save.stall_s += time.monotonic() - begun_s

    def _is_behind(self, max_wait_s: float) -> bool:
        """Return True if the save in flight will take a while.

        A save expected within `max_wait_s` is waited for, once: where storage hangs, a late save
        may stay late for minutes.
        """
        if self._holds_step:
            self.join(HOLD_S)
        if self.busy and self._may_wait and (save := self._save) is not None:
            predicted_s = save.num_bytes * (self._timings.seconds_per_byte or 0.0)
            if predicted_s - (time.monotonic() - save.begun_s) < max_wait_s:
                self.join(PATIENCE_S)
                self._may_wait = not self.busy
        return self.busy

    def _skip(self, handle: SaveHandle, name: SnapshotName, why: str) -> None:
        self.skipped += 1
        self.saves.note_not_kept(str(name), SKIPPED, why)
        handle.fail(SaveFailed(f"skipped: {why}"))
        if self._channel.world.rank == 0 and (self.skipped == 1 or self.skipped % 10 == 0):
            logger.warning(
                "save %s was skipped: %s (%d so far); save less often, or to faster storage",
                name,
                why,
                self.skipped,
            )

    def _stage(self, cursor: Cursor, *, final: bool, behind: bool, in_memory: bool) -> _Staged:
        """Do steps 2 to 4."""
        world = self._channel.world
        answer = dict[str, Any](place=cursor.place(), behind=behind, attempt=self._defaults.attempt)
        cause: Exception | None = None
        try:
            captured = capture(self._registry)
            stepped = only_stepped(captured, self._registry, [self.arenas.device_copier.kind])
            answer.update(self._replica_check.report(captured, stepped, final=final))
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for an answer
            answer["error"] = f"rank {world.rank}: {getattr(error, 'message', repr(error))}"
            cause = error
        key = groups_key(self.sequence)
        # Ranks stand at one boundary, so a collective of training would wait no longer either.
        limit_s = min(RANKS_TIMEOUT_S, collective_timeout_s())
        agreed = self._channel.fold(key, answer, combine_answers, limit_s)
        if agreed["error"]:
            raise SaveFailed(agreed["error"]) from cause
        if agreed["behind"]:
            raise _Skipped("the previous save is still being written")
        plan = self._plan_cache.plan(captured, self._replica_check.equal_groups(agreed))
        shard = self._shard(captured, plan.regions, None if final else stepped, in_memory=in_memory)
        return _Staged(captured, shard, plan.entries, agreed["attempt"], plan.num_bytes)

    def _shard(
        self,
        captured: Captured,
        planned: Sequence[Region],
        stepped: set[str] | None,
        *,
        in_memory: bool,
    ) -> staging.Shard | staging.StreamedShard:
        """Stage or stream.

        `stepped`: tensors to copy beside training; None: training waits anyway.
        """
        final, find, world = stepped is None, self.references.find_unchanged, self._channel.world
        facts: dict[str, Any] = {
            "rank": world.rank,
            "world": world.size,
            "references": {} if in_memory else find(captured, planned, final=final),
        }
        if facts["references"]:
            planned = [region for region in planned if region.key not in facts["references"]]
        if (not final or self.arenas.are_ready) and self.replication.can_reuse_arena():
            how = {**facts, **self._copier.stage_arguments(stepped or set())}
            memory, device_copier = self.arenas.memory, self.arenas.device_copier
            device_copier.use(captured.tensors.values())
            with contextlib.suppress(ArenaUnavailable):
                shard = staging.stage(
                    captured,
                    planned,
                    memory=memory,
                    device_copier=device_copier,
                    cache=self._staging_cache,
                    **how,
                )
                shard.descriptor = self.arenas.descriptor
                self._copier.begin(shard)
                return shard
        return staging.stream(captured, planned, **facts)

    def _prepare(self) -> None:
        """Prepare memory before the first save: to touch so much anew takes long."""
        num_bytes = shard_bytes(
            self._registry, self._channel.world.size, gradients=self._saves_gradients()
        )
        self.arenas.device_copier.use(self._registry.all_parameters())
        self.arenas.prepare(num_bytes)
        self._committer.prepare(num_bytes)

    def _write(self, save: _SaveInFlight) -> None:
        # background thread: no collectives here, only the store
        time.sleep(YIELD_S)
        assert save.staged is not None
        shard, entries = save.staged.shard, save.staged.entries
        save.staged = None  # this thread releases the captured state: that takes a while
        manifest, in_memory = save.manifest, save.in_memory
        finish = partial(self._finish, save)
        try:
            file = self._committer.write(manifest, shard, entries, finish, in_memory=in_memory)
            if in_memory:
                self.replication.keep_in_memory(
                    manifest.name, self._committer.manifest, shard, save.handle
                )
                self._cut_off = self.replication.is_cut_off
                self.saves.note_kept_in_memory()
                return
        except SaveFailed as error:
            self._record_failure(save.handle, manifest.name, error)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._cut_off = isinstance(error, NoAgreement)
            failure = SaveFailed(str(error) or repr(error), kind=kind_of(error))
            self._record_failure(save.handle, manifest.name, failure)
        else:
            now_s, stored_s = time.monotonic(), self._committer.stored_s
            memory_s = save.memory_s
            event = CommitEvent(
                manifest=manifest,
                whole=self._committer.manifest,
                shard=shard,
                file=file,
                handle=save.handle,
                num_bytes=save.num_bytes,
                seconds=now_s - save.begun_s,
                is_final=save.is_final,
                stages=SaveStages(
                    memory_s,
                    stored_s - save.begun_s - (memory_s or 0.0),
                    now_s - stored_s,
                ),
            )
            self._record_stages(save, event)
            for subscriber in self._commit_subscribers:
                try:
                    subscriber(event)
                except Exception as error:  # noqa: BLE001 - the snapshot stands, and others have to know of it
                    logger.warning(
                        "a task after the commit of %s failed: %s",
                        manifest.name,
                        str(error) or repr(error),
                    )
            if save.handle.why_not_replicated == "":
                self.saves.note_arrival(str(manifest.name), PARTNER)

    def _record_stages(self, save: _SaveInFlight, event: CommitEvent) -> None:
        """Note a commit for the attempt's record, before the first subscriber writes that."""
        if event.whole is None:
            return
        row = SaveRow(
            snapshot=str(event.manifest.name),
            at=event.manifest.created,
            stall_s=None if save.is_final else save.stall_s,
            memory_s=save.memory_s,
            local_s=event.seconds,
            num_bytes=event.whole.num_bytes,
            reached_bytes=event.whole.reached_bytes,
        )
        self.saves.note_commit(row, save.begun_s)

    def _count_commit(self, event: CommitEvent) -> None:
        self.committed = (str(event.manifest.name), event.manifest.cursor)
        self.created = event.manifest.created
        self.failures, self._may_wait = 0, True
        if event.whole is not None:
            self.written_bytes += sum(file.num_bytes for file in event.whole.files)

    def _report_commit(self, event: CommitEvent) -> None:
        if self._channel.world.rank == 0:
            now_s, level = time.monotonic(), logging.DEBUG
            if event.is_final or event.manifest.tags or now_s >= self._report_from_s:
                self._report_from_s, level = now_s + REPORT_EVERY_S, logging.INFO
            logger.log(level, "saved %s (%s)", event.manifest.name, event.manifest.reason)
        event.handle.reach(COMMITTED)

    def saving_now(self, now_s: float) -> SavingNow | None:
        """Return what is being written; None: nothing is. Any thread."""
        save = self._save
        if save is None or not self.busy or save.handle.ended:
            return None
        per_byte = self._timings.seconds_per_byte
        return SavingNow(
            snapshot=str(save.manifest.name),
            num_bytes=save.num_bytes,
            file_bytes=save.file_bytes,
            seconds=max(now_s - save.begun_s, 0.0),
            predicted_s=None if per_byte is None else per_byte * save.num_bytes,
            in_memory=save.in_memory,
        )

    def _finish(self, save: _SaveInFlight) -> Iterator[int]:
        yield from self._copier.finish()
        if self.arenas.descriptor is not None:
            save.memory_s = time.monotonic() - save.begun_s
            self._timings.record_copy(save.num_bytes, save.memory_s)

    def adopt(self, name: str, cursor: Cursor) -> None:
        """Take a snapshot that the survivors committed as the newest of this attempt."""
        self.committed = name, cursor

    def _record_failure(self, handle: SaveHandle, name: SnapshotName, error: SaveFailed) -> None:
        self.failures += 1
        self.failed += 1
        self.failed_by_kind[error.kind] += 1
        self.saves.note_not_kept(str(name), FAILED, error.message)
        next_step = f"; next: {error.hint}" if error.hint else ""
        if self.failures == 1:
            logger.warning("save %s failed, training goes on: %s%s", name, error.message, next_step)
        else:
            newest = self.committed[0] if self.committed else self._defaults.parent
            logger.error(
                "save %s failed, as did %d before it: a stop now loses all training since %s. %s%s",
                name,
                self.failures - 1,
                newest or "step 0, since the run has no snapshot",
                error.message,
                next_step,
            )
        handle.fail(error)
