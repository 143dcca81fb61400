"""The saver: takes one snapshot at a time, on all ranks together.

    training thread, at a boundary               saving thread, training goes on
    1  wait for the save in flight, if any        5  write the shard file, fsync        (every rank)
    2  capture; agree which groups are shared     6  report its receipt                 (every rank)
    3  plan what this rank stores, and what of    7  commit when all have reported      (rank 0)
       it an older file holds already
    4  copy the rest into one shard: "staged"     8  tell all: "durable"; prune         (rank 0)
       (the saving thread may copy a part beside training: `copying`)

All ranks take the same saves in the same order, since each is asked for at a boundary that all
agreed on. A rank that fails says so in 2 or 6, and then nobody commits: training goes on, the
failure is logged, older snapshots stand.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.encryption.sealed_file import Layout
from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.format.manifest import Manifest
from trainckpt.format.names import SnapshotName, shard_file_name
from trainckpt.format.versions import VERSION
from trainckpt.lifecycle.flushing.flushing import Flushing
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.pending import COMMITTED, STAGED, PendingSave
from trainckpt.lifecycle.saving import save_keys
from trainckpt.lifecycle.saving.arenas import SPARE_BYTES, NoArena
from trainckpt.lifecycle.saving.begun import Begun
from trainckpt.lifecycle.saving.comparing import Comparing, verdict
from trainckpt.lifecycle.saving.copying import Copying
from trainckpt.lifecycle.saving.plans import Plans
from trainckpt.lifecycle.saving.protecting import Protecting
from trainckpt.lifecycle.saving.references import References
from trainckpt.lifecycle.saving.stale import Stale
from trainckpt.lifecycle.saving.writer import RANKS_TIMEOUT_S, Facts, Writer
from trainckpt.preemption.alarms import raised_by_handler
from trainckpt.ranks import talking
from trainckpt.ranks.world import collective_timeout_s
from trainckpt.state import stage
from trainckpt.state.capture import capture
from trainckpt.state.overlap import only_stepped
from trainckpt.state.weight import shard_bytes, weigh

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import TensorEntry
    from trainckpt.format.shard_file import Region
    from trainckpt.lifecycle.deciding.pace import Pace
    from trainckpt.lifecycle.run.attempt_log import AttemptLog
    from trainckpt.lifecycle.saving.arenas import Arenas
    from trainckpt.lifecycle.saving.sealing import Sealing
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier

NEARLY_S, PATIENCE_S = 1.0, 10.0  # a save that should be there so soon is waited for so long, once
HOLD_S = 60.0  # a step waits so long for the state before it to be kept by others
# The interpreter runs one thread for 5 ms while others wait: what begins beside training lets the
# thread that trains leave the boundary first.
AFTER_YOU_S = 0.001


class _Skipped(Exception):
    """All ranks skip this save."""


class Saver:
    """Takes the snapshots of one attempt.

    Attributes:
        committed: Full name and cursor of the newest snapshot this attempt committed.
        in_flight: The save that is being written, or the last one.
        skipped: Saves that all ranks have skipped, since one before was still being written.
        references: What of this rank need not be written.
        flushing: Who copies what is committed to slower tiers.
        protecting: Who has other hosts keep what this one has.
        holds_steps: A step waits until others keep the state before it, so that one is lost at
            most. For saves to memory at every step.
    """

    holds_steps = False

    def __init__(
        self,
        tier: Tier,
        channel: Channel,
        registry: Registry,
        facts: Facts,
        log: AttemptLog,
        pace: Pace,
        arenas: Arenas,
        window_start: Callable[[], Cursor],
        sealing: Sealing | None = None,
        *,
        saves_gradients: Callable[[], bool] = lambda: False,
    ) -> None:
        """`saves_gradients`: whether saves without a stop may fall amid a window."""
        self.committed: tuple[str, Cursor] | None = None
        self.in_flight: PendingSave | None = None
        self.skipped = self._failures = 0  # failures in a row
        self.arenas = arenas
        self.flushing = Flushing()
        self._channel = channel
        self._copying = Copying(
            registry, self._prepare, num_threads=arenas.copy_threads, hold=self._hold,
            side=arenas.side,
        )  # fmt: skip
        self.protecting = Protecting(arenas, channel.world.rank)
        self.references = References(tier, channel.world.rank, registry)
        self._writer = Writer(
            tier, channel, registry.files, facts, log, self.references,
            lambda: self.flushing.busy, sealing, self.protecting.room,
        )  # fmt: skip
        self._is_encrypted = sealing is not None
        self._stale, self._begun_with = Stale(registry), Begun(registry)
        self._registry, self._facts, self._pace = registry, facts, pace
        self._window_start, self._saves_gradients = window_start, saves_gradients
        self._plans = Plans(channel.world.rank, channel.world.size)
        self._comparing = Comparing(channel.world.rank, channel.world.size)
        self._sequence = 0
        self._in_memory = self._is_last = False  # the save in flight
        self._cut_off = False  # the last save found a rank gone
        self._is_patient = True  # the last save that was waited for came in time
        self._thread: threading.Thread | None = None
        self._captured: Captured | None = None  # let go by the saving thread: that takes a while
        self._begun = (0.0, 0)  # when the save in flight was begun, and its bytes

    def save(
        self,
        cursor: Cursor,
        reason: str,
        tags: tuple[str, ...],
        pending: PendingSave,
        *,
        last: bool = False,
        may_skip: bool = False,
        asked: bool = False,
        in_memory: bool = False,
    ) -> PendingSave:
        """Take a snapshot now. Every rank calls it at the same boundary.

        Returns when the state is staged, or the save has failed; never raises for a failed save,
        but what a signal handler of the script's raised meanwhile.

        Args:
            cursor, reason, tags: For the manifest.
            pending: Is moved on.
            last: Nothing need be copied: the caller changes nothing before `wait` or `give_up`.
            may_skip: All skip it if on any rank the save before is far from being written.
            asked: Then it is put off, not skipped, and `pending` says so.
            in_memory: It stays in the memory of the hosts, and is not written to the run's place.
        """
        pending.is_asked = asked or not may_skip
        behind = may_skip and self._is_behind(PATIENCE_S if asked else NEARLY_S)
        if not behind:
            self.join()
            self._writer.haste.is_over()
            self._writer.begin()
        begun_s = time.monotonic()
        self._sequence += 1
        self._in_memory, self._is_last = in_memory, last
        name = SnapshotName(self._facts.attempt, self._sequence, cursor.step, cursor.micro)
        try:
            with self._registry.unchanged():
                self._begun_with.look()
                shard, shared, attempt = self._stage(cursor, last=last, behind=behind)
                num_bytes = weigh(self._registry, gradients=True).now
        except _Skipped as skipped:
            if asked:
                pending.put_off = str(skipped)
            else:
                self._skip(pending, name, str(skipped))
            return pending
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._writer.tell(name.sequence, {"error": f"rank {self._channel.world.rank}: {error}"})
            self._failed(pending, name, SaveFailed(f"nothing was captured: {error}"))
            if alarm := raised_by_handler(error):
                raise alarm from None
            return pending
        name = replace(name, attempt=attempt)
        self.in_flight = pending
        pending.settle = partial(self._hurry, pending, name.sequence)
        pending.reach(STAGED, str(name))
        self._begun = begun_s, num_bytes
        manifest = Manifest(
            self._facts.run, name, self._facts.parent, cursor, self._channel.world.size, (), {},
            time.time(), tags=tags, reason=reason, fingerprint=self._facts.fingerprint,
            writer=f"trainckpt {VERSION}", window=self._window_start(),
        )  # fmt: skip
        self._thread = talking.thread(
            self._write, "trainckpt-save", manifest, shard, shared, pending
        )
        self._thread.start()
        if isinstance(shard, stage.Stream) and not last:
            shard.is_read.wait()  # no memory for a copy: the tensors must not change meanwhile
        self._pace.stalled(time.monotonic() - begun_s)
        return pending

    def _hurry(self, pending: PendingSave, sequence: int) -> None:
        """Training waits for this save. Training thread."""
        self._copying.settle()
        if not pending.ended:
            self._writer.haste.ask(sequence)

    def join(self, limit_s: float | None = None) -> None:
        """Return when no save is in flight, or after `limit_s` seconds, or twice as many where
        its copies are not made. Training thread.
        """
        self._copying.settle(limit_s)
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None

    def wait(self, limit_s: float | None = None) -> None:
        """As `join`; and when what older saves have left is pruned, or after `limit_s` more."""
        self.join(limit_s)
        self.tidy(limit_s)

    def tidy(self, limit_s: float | None) -> None:
        """Return when what older saves have left is pruned, or after `limit_s` seconds."""
        self._writer.tidying.wait(limit_s)

    def close(self, *, keep: bool) -> None:
        """The attempt is over; `keep` what is in shared memory for the next one."""
        self._copying.close()
        if not self.busy:
            self.protecting.close(keep=keep)
            self.arenas.close(keep=keep)
            self._writer.close(keep=keep)

    def rest(self) -> memoryview:
        """No save comes for a while. Returns memory in which nothing is kept."""
        self._writer.rest()
        return self.arenas.rest()

    def give_up(self) -> None:
        """The save in flight must not be committed any more, unless all is written already."""
        self._writer.give_up()

    @property
    def has_room(self) -> bool:
        """Whether a last save may stay in memory. Encrypted, it lies there twice."""
        num_bytes = shard_bytes(self._registry, self._channel.world.size)
        num_bytes += weigh(self._registry, gradients=True).gradients
        stored_bytes = Layout(SPARE_BYTES, num_bytes).stored_bytes
        return not self._is_encrypted or self.protecting.has_room(stored_bytes)

    @property
    def sequence(self) -> int:
        """Number of the last save that was begun."""
        return self._sequence

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def _hold(self) -> None:
        """Before a step. Whoever takes it has trained with all others, so all have begun the save
        that is waited for, and each of them comes to its end. If one of them is gone, nobody will
        train on with it, and the step would only be lost.
        """
        if not (self.holds_steps and self._in_memory):
            return
        self.join(HOLD_S)
        if self._cut_off:
            self.holds_steps = False
            logger.warning("another rank is gone: no step is taken that nobody keeps")
            time.sleep(HOLD_S)  # whoever ends this process does it meanwhile

    def _is_behind(self, nearly_s: float) -> bool:
        """Whether the save in flight will take a while. One that should be there in `nearly_s` is
        waited for, once: what is late then may be so for minutes, in a place that hangs.
        """
        if self.holds_steps and self._in_memory:
            self.join(HOLD_S)
        if self.busy and self._is_patient:
            begun_s, num_bytes = self._begun
            predicted_s = num_bytes * (self._pace.seconds_per_byte or 0.0)
            if predicted_s - (time.monotonic() - begun_s) < nearly_s:
                self.join(PATIENCE_S)
                self._is_patient = not self.busy
        return self.busy

    def _skip(self, pending: PendingSave, name: SnapshotName, why: str) -> None:
        self.skipped += 1
        pending.fail(SaveFailed(f"skipped: {why}"))
        if self._channel.world.rank == 0 and (self.skipped == 1 or self.skipped % 10 == 0):
            logger.warning("save %s was skipped: %s (%d so far); save less often, or to a faster "
                           "place", name, why, self.skipped)  # fmt: skip

    def _stage(
        self, cursor: Cursor, *, last: bool, behind: bool
    ) -> tuple[stage.Shard | stage.Stream, dict[str, TensorEntry], int]:
        """Steps 2 to 4. Returns the shard, an entry for every tensor of this rank, the attempt."""
        world = self._channel.world
        answer = dict[str, Any](place=cursor.place(), behind=behind, attempt=self._facts.attempt)
        cause: Exception | None = None
        try:
            captured = capture(self._registry)
            stepped = only_stepped(captured, self._registry, [self.arenas.side.kind])
            answer.update(self._comparing.answer(captured, stepped, last=last))
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for an answer
            answer["error"] = f"rank {world.rank}: {getattr(error, 'message', repr(error))}"
            cause = error
        key = save_keys.groups(self._sequence)
        # Ranks stand at one boundary, so a collective of training would wait no longer either.
        limit_s = min(RANKS_TIMEOUT_S, collective_timeout_s())
        agreed = self._channel.fold(key, answer, verdict, limit_s)
        if agreed["error"]:
            raise SaveFailed(agreed["error"]) from cause
        if agreed["behind"]:
            raise _Skipped("the one before it is still being written")
        plan = self._plans.plan(captured, self._comparing.alike(agreed))
        shard = self._shard(captured, plan.regions, None if last else stepped)
        self._captured = captured
        return shard, plan.entries, agreed["attempt"]

    def _shard(
        self, captured: Captured, planned: Sequence[Region], stepped: set[str] | None
    ) -> stage.Shard | stage.Stream:
        """`stepped`: what may be copied beside training; None: nothing need be, it waits anyway."""
        last, find, world = stepped is None, self.references.find, self._channel.world
        facts: dict[str, Any] = {
            "rank": world.rank, "world": world.size,
            "references": {} if self._in_memory else find(captured, planned, last=last),
        }  # fmt: skip
        planned = [region for region in planned if region.key not in facts["references"]]
        if (not last or self.arenas.are_ready) and self.protecting.lets_go():
            how = {**facts, **self._copying.how(stepped or set())}
            memory, side = self.arenas.memory, self.arenas.side
            side.use(captured.tensors.values())
            with contextlib.suppress(NoArena):
                shard = stage.stage(captured, planned, memory=memory, side=side, **how)
                shard.descriptor = self.arenas.descriptor
                self._copying.begin(shard)
                return shard
        return stage.stream(captured, planned, **facts)

    def _prepare(self) -> None:
        """Before the first save: to touch so much memory anew takes long."""
        num_bytes = shard_bytes(
            self._registry, self._channel.world.size, gradients=self._saves_gradients()
        )
        self.arenas.side.use(self._registry.all_parameters())
        self.arenas.prepare(num_bytes)
        self._writer.prepare(num_bytes)

    def _write(
        self,
        manifest: Manifest,
        shard: stage.Shard | stage.Stream,
        entries: dict[str, TensorEntry],
        pending: PendingSave,
    ) -> None:
        # background thread: no collectives here, only the store
        time.sleep(AFTER_YOU_S)
        self._captured = None
        try:
            in_memory = self._in_memory
            self._writer.write(manifest, shard, entries, self._finish, in_memory=in_memory)
            if in_memory:
                self.protecting.keep(manifest.name, self._writer.whole, shard, pending)
                self._cut_off = self.protecting.is_cut_off
                return
        except SaveFailed as error:
            self._failed(pending, manifest.name, error)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._cut_off = isinstance(error, NoAgreement)
            self._failed(pending, manifest.name, SaveFailed(str(error) or repr(error)))
        else:
            self.committed = (str(manifest.name), manifest.cursor)
            self._failures = 0
            self._stale.look(manifest.cursor.step, shard.header)
            if isinstance(shard, stage.Shard):
                self.arenas.publish(manifest.name, shard_file_name(self._channel.world.rank))
            if self._channel.world.rank == 0:
                logger.info("saved %s (%s)", manifest.name, manifest.reason)
            begun_s, num_bytes = self._begun
            self._pace.saved(num_bytes, time.monotonic() - begun_s)
            self._is_patient = True
            pending.reach(COMMITTED)
            self.flushing.committed(manifest, pending, num_bytes)
            self._writer.tidy(manifest.name)
            if self._is_last:
                pending.protect("it is the last, and committed")
            else:
                self.protecting.protect(manifest.name, self._writer.whole, shard, pending)

    def _finish(self, is_urgent: Callable[[], bool]) -> Iterator[int]:
        yield from self._copying.finish(is_urgent)
        begun_s, num_bytes = self._begun
        if self.arenas.descriptor is not None:
            self._pace.copied(num_bytes, time.monotonic() - begun_s)

    def _failed(self, pending: PendingSave, name: SnapshotName, error: SaveFailed) -> None:
        self._failures += 1
        next_step = f"; next: {error.hint}" if error.hint else ""
        if self._failures == 1:
            logger.warning("save %s failed, training goes on: %s%s", name, error.message, next_step)
        else:
            newest = self.committed[0] if self.committed else self._facts.parent
            logger.error(
                "save %s failed, as did %d before it: a stop now loses what was trained since "
                "%s. %s%s", name, self._failures - 1, newest or "step 0, for nothing is saved yet",
                error.message, next_step,
            )  # fmt: skip
        pending.fail(error)
