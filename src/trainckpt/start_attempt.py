"""Start an attempt: claim it, read its snapshot, build the objects that save and shut down.

`RankContext` holds the dependencies of one rank, from the Checkpointer's construction on. `Attempt`
holds the additional ones, once the attempt is claimed and the snapshot applied.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import fingerprint, launch
from trainckpt.attempt.error_json import gather_or_raise
from trainckpt.attempt.fingerprint import differences, take_fingerprint
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import misspelled_variables
from trainckpt.attempt.rank_status import CLAIMED, SUPERVISOR_VARIABLE
from trainckpt.attempt.record_log import AttemptId, AttemptLog
from trainckpt.dumping.communicators import Communicators
from trainckpt.dumping.lean_dump import LeanDump
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import Restored
from trainckpt.gc_pause import gc_paused
from trainckpt.inspect.load import put
from trainckpt.ranks.store import connect
from trainckpt.ranks.world import agree_on_name
from trainckpt.replicate import uploads
from trainckpt.replicate.replicator import set_up, set_up_local
from trainckpt.replicate.tier_uploader import TierUploader
from trainckpt.replicate.uploads import ArenaFirstReader, UploadContext, Uploads
from trainckpt.resume.candidate_order import KEEP_LAST
from trainckpt.resume.init_from import InitialWeights, read_initial
from trainckpt.resume.report import (
    ResumeReport,
    not_deterministic,
    of_all_ranks,
    other_state,
    own_objects,
    said_after_loading,
    said_by_objects,
)
from trainckpt.resume.resume import ResumePoint, begin, record_parent, record_refusal
from trainckpt.run_directory.tier_config import WHERE, TierConfig, where
from trainckpt.run_directory.tier_set import TierSet
from trainckpt.run_directory.validate import RANKS_TIMEOUT_S
from trainckpt.save import encryption
from trainckpt.save.arenas import Arenas
from trainckpt.save.coordinator import SaveCoordinator
from trainckpt.save.replication_control import ReplicationControl
from trainckpt.save.schedule import PRIOR_S, SaveSchedule, interval_s, mean_time_between_failures_s
from trainckpt.save.writer import ManifestDefaults
from trainckpt.snapshot.attempt_history import read_attempts
from trainckpt.snapshot.decrypting_tier import KeyRing
from trainckpt.state.capture import capture, must_be_storable
from trainckpt.state.state_size import weigh
from trainckpt.stop.dump_pause import DumpPause
from trainckpt.stop.final_save import FinalSave
from trainckpt.stop.listener import say_how_it_stops, say_where
from trainckpt.stop.shutdown import HardExit, Shutdown
from trainckpt.stop.survivor_setup import set_up as survive
from trainckpt.storage.fs_probe import file_system, free_bytes, is_remote
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import reclaim

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.attempt.data_world import DataWorld
    from trainckpt.attempt.options import Options
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.attempt.rank_status import RankStatusWriter
    from trainckpt.attempt.script_hooks import Hooks
    from trainckpt.attempt.tracked_files import TrackedFiles
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.store import RankStore
    from trainckpt.ranks.world import World
    from trainckpt.resume.apply_phases import PhasedRestore
    from trainckpt.resume.crash_marker import CrashMarker
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.save.estimates import SaveEstimator, Timings
    from trainckpt.save.requests import SaveRequests
    from trainckpt.state.registry import Registry
    from trainckpt.stop.listener import NoticeListener
    from trainckpt.stop.survivor_setup import SurvivorSetup
    from trainckpt.storage.base import Place


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Dependencies of one rank, independent of the attempt.

    Attributes:
        loaders: The owner's own list: a loader may be registered later.
        slower: The slower tiers named by the options.
        data_world: Groups of ranks with different data, if the script declares them.
        problems: Reasons against a bitwise resume found in the script's objects.
    """

    options: Options
    tier: Place
    world: World
    registry: Registry
    position: ProgressCounter
    timings: Timings
    estimator: SaveEstimator
    phased_restore: PhasedRestore
    listener: NoticeListener
    hard_exit: HardExit
    status_writer: RankStatusWriter
    requests: SaveRequests
    loaders: list[tuple[Any, TrackedLoader]]
    problems: list[Restored]
    crash_marker: CrashMarker
    files: TrackedFiles
    hooks: Hooks
    slower: TierConfig
    data_world: DataWorld | None = None

    @cached_property
    def channel(self) -> RankStore:
        """Store between the ranks, with keys of this start alone. First use waits for all ranks."""
        return connect(self.world, agree_on_name(self.world))

    @cached_property
    def opener(self) -> KeyRing:
        """Key ring for encrypted files."""
        return KeyRing(self.options.identity)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's processes, on one rank, ready to train.

    Attributes:
        beginning: The attempt's starting point.
        survival: Setup for saves after other ranks die; None: no such saves.
    """

    beginning: ResumePoint
    log: AttemptLog
    saver: SaveCoordinator
    report: ResumeReport
    shutdown: Shutdown
    schedule: SaveSchedule
    survival: SurvivorSetup | None = None

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return self.beginning.record.attempt

    def begin_window(self, position: ProgressCounter, *, resumable: bool) -> None:
        """Keep the state at a window's start, in case other ranks die. Called at each boundary."""
        if self.survival is not None and resumable and not position.micro:
            self.survival.note(position.cursor)

    def must_be_able_to_save(self, context: RankContext, *, at_first: bool) -> None:
        """Refuse a state that no save could store, and warn if the disk lacks room for it.

        Called at the first boundary and at the first after a step, so that it fails early. All
        ranks pass the first boundary and refuse together. After it only the affected rank logs an
        error, since the others might wait for it in vain; the next save then fails on all, with the
        reason.

        Args:
            context: Dependencies of this rank.
            at_first: This is the first boundary.

        Raises:
            ConfigurationError: a tracked object's state cannot be stored; named in the message.
        """
        if at_first or context.world.size == 1:
            check = partial(must_be_storable, context.registry)
            gather_or_raise(context.channel, f"storable/{int(at_first)}", check, RANKS_TIMEOUT_S)
        else:
            try:
                must_be_storable(context.registry)
            except ConfigurationError as error:
                logger.error("no checkpoint can be saved: %s; next: %s", error.message, error.hint)
        is_first = context.world.rank == 0
        if not (is_first and isinstance(context.tier, LocalTier)) or context.options.exclude:
            return
        with contextlib.suppress(OSError):
            needed, free = (
                weigh(context.registry, gradients=False).state,
                free_bytes(context.tier.root),
            )
            if 0 <= free < needed:
                logger.error(
                    "%s has %.1f MB left, and a checkpoint needs %.1f MB: unless space is freed, "
                    "nothing can be saved there",
                    context.tier.url,
                    free / 1e6,
                    needed / 1e6,
                )

    @property
    def resumed_from(self) -> Cursor | None:
        """Cursor this attempt resumed from, or None if it began at step 0."""
        return self.beginning.cursor


def start_attempt(context: RankContext, mode: str) -> Attempt:
    """Claim the next attempt, choose and read its snapshot, apply it. Every rank calls it.

    Raises:
        TrainckptError: as `Checkpointer.resume` documents, on every rank alike.
    """
    with context.status_writer.refusals(), gc_paused():
        beginning = _begin(context, mode)
        try:
            return _make_ready(context, beginning)
        except BaseException:
            context.crash_marker.stop()
            context.listener.end()
            raise


def _make_ready(context: RankContext, beginning: ResumePoint) -> Attempt:
    devices = context.registry.devices()
    own = fingerprint.describe(fingerprint.training_devices(devices))
    everyone = context.channel.gather("devices", own, RANKS_TIMEOUT_S)
    here = take_fingerprint(context.world.size, devices, everyone)
    parent = str(beginning.manifest.name) if beginning.manifest else None
    log = AttemptLog(context.tier, beginning.record, writes=context.world.rank == 0)
    if beginning.manifest is not None:
        encryption.check_stays_encrypted(beginning.manifest, context.options)
    initial = _read_initial(context, beginning)
    record_parent(context.channel, log, parent, _chosen(context, initial))
    if initial is not None:
        put(initial.loading)
    number = AttemptId(beginning.record.attempt)
    facts = ManifestDefaults(beginning.run, number, parent, here, context.options.keep_last)
    seals = encryption.set_up(context.options, context.channel, beginning.run)
    arenas = _arenas(context, beginning)
    hosts = beginning.record.facts["hosts"]
    saver = SaveCoordinator(
        tier=context.tier,
        channel=context.channel,
        registry=context.registry,
        facts=facts,
        log=log,
        timings=context.timings,
        arenas=arenas,
        window_start=context.position.window_start,
        sealing=seals,
        uploads=_uploads(context, arenas, log, facts, beginning),
        replication=ReplicationControl(
            arenas,
            context.world.rank,
            set_up(context.options, context.channel, context.tier.url, hosts),
            partial(set_up_local, context.channel, context.tier.url, hosts),
        ),
        saves_gradients=partial(_saves_gradients, context),
        blocks_step=context.options.memory_every.steps == 1,
    )
    survival = survive(
        options=context.options,
        channel=context.channel,
        tier=context.tier,
        registry=context.registry,
        facts=facts,
        saver=saver,
        hard_exit=context.hard_exit,
        hosts=hosts,
        status_writer=context.status_writer,
        seals=seals,
    )
    dump_pause = None
    if len(set(hosts)) == 1 and SUPERVISOR_VARIABLE in os.environ:
        # This host has no key to read an encrypted snapshot back.
        dump_pause = _dump_pause(context, facts, saver, lean=survival is None and seals is None)
    parts = list[Restored]()
    if beginning.manifest is not None:
        parts += other_state(beginning, own_objects(context.registry))
        parts += said_by_objects(context.registry, beginning)
        parts += not_deterministic(here) + differences(beginning.manifest.fingerprint, here)
    report = ResumeReport(
        channel=context.channel,
        is_resumed=beginning.manifest is not None,
        restored=[*context.problems, *parts] if beginning.manifest is not None else [],
    )
    shutdown = Shutdown(
        options=context.options,
        channel=context.channel,
        last_save=_final_save(context, saver, beginning),
        listener=context.listener,
        log=log,
        report=report,
        status_writer=context.status_writer,
        requests=context.requests,
        loaders=context.loaders,
        where=lambda: context.position.cursor,
        hard_exit=context.hard_exit,
        survival=survival,
        dump_pause=dump_pause,
    )
    if beginning.manifest is not None:
        _refer(saver, seals, beginning)
        _arrive(context, shutdown, beginning)
        parts = [*context.problems, *parts, *said_after_loading(context.registry, beginning)]
        report.set_restored(of_all_ranks(context.channel, parts))
    if context.world.rank == 0:
        say_where(context.tier, beginning, report.exactness, context.registry)
        _say_what_was_chosen(context, initial)
        lost = launch.missing_supervisor(os.environ)
        say_how_it_stops(context.estimator.describe(), context.listener.grace_s, lost)
    schedule = SaveSchedule(
        context.options.every,
        context.position.step,
        time.monotonic(),
        _interval(context, beginning),
        context.options.memory_every,
    )
    if beginning.saved is not None:  # only `PhasedRestore` needs it, until the first batch
        beginning = replace(beginning, saved=beginning.saved.without_state(), reader=None)
    if beginning.manifest is not None:
        saver.replication.begin_from([context.tier, *context.slower.tiers], beginning.manifest)
    saver.uploads.start()
    return Attempt(
        beginning=beginning,
        log=log,
        saver=saver,
        report=report,
        shutdown=shutdown,
        schedule=schedule,
        survival=survival,
    )


def _refer(
    saver: SaveCoordinator, seals: SnapshotEncryption | None, beginning: ResumePoint
) -> None:
    """Permit references to the initial snapshot if both are encrypted to the same recipients, or
    neither is.

    Otherwise a snapshot would be readable to the wrong recipients, or unreadable to its own.
    """
    manifest = beginning.manifest
    assert manifest is not None
    if not encryption.may_refer(seals, manifest):
        return
    saver.references.begin_from(manifest, beginning.reader)
    if seals is not None:
        seals.begin_from(manifest)


def _uploads(
    context: RankContext,
    arenas: Arenas,
    log: AttemptLog,
    facts: ManifestDefaults,
    beginning: ResumePoint,
) -> Uploads:
    """Build the uploads of this attempt's snapshots to the slower tiers."""
    copy_from = None if context.options.encrypt_to else arenas.copy_from
    near = ArenaFirstReader(context.tier, copy_from)
    work = UploadContext(
        run_tier=context.tier,
        arena_first=near,
        channel=context.channel,
        log=log,
        run=facts.run,
        number=facts.number,
        keep_last=context.options.keep_last,
    )
    durable, every = context.slower.durable, context.options.every
    step = beginning.cursor.step if beginning.cursor is not None else 0
    uploaders = [
        TierUploader(
            tier,
            work,
            number,
            is_durable=tier.name == durable,
            every=uploads.interval_of(every, tier),
            begun_step=step,
        )
        for number, tier in enumerate(context.slower.tiers)
    ]
    return Uploads(uploaders, durable)


def _read_initial(context: RankContext, beginning: ResumePoint) -> InitialWeights | None:
    """Read the initial weights of `init_from` at step 0; compared on all ranks."""
    if beginning.manifest is not None or context.options.init_from is None:
        return None
    begun_s = time.monotonic()
    try:
        return read_initial(context.options.init_from, context.registry, context.channel)
    except BaseException as error:
        if context.world.rank == 0:
            record_refusal(context.tier, beginning.record, error, time.monotonic() - begun_s)
        raise


def _chosen(context: RankContext, initial: InitialWeights | None) -> dict[str, Any]:
    """Return the options to store in the attempt's record."""
    found: dict[str, Any] = {KEEP_LAST: context.options.keep_last, WHERE: where(context.tier)}
    found |= context.slower.to_facts()
    if initial is not None:
        found["init_from"] = initial.source
    if context.options.exclude:
        found["exclude"] = list(context.options.exclude)
    if context.data_world is not None:
        found["data_ranks"] = context.data_world.size
    return found


def _say_what_was_chosen(context: RankContext, initial: InitialWeights | None) -> None:
    for sentence in misspelled_variables(os.environ):
        logger.warning(sentence)
    if initial is not None:
        logger.info("weights and buffers loaded from %s", initial.source)
    if excluded := sum(len(model.excluded) for model in context.registry.models):
        by = ", ".join(context.options.exclude)
        logger.info("exclude leaves %d tensors out of snapshots: %s", excluded, by)
    if context.data_world is not None:
        logger.debug("the data is divided over %s", context.data_world)


def _begin(context: RankContext, mode: str) -> ResumePoint:
    def claimed(attempt: int) -> None:
        context.crash_marker.listen(attempt)
        context.status_writer.update(state=CLAIMED, attempt=attempt, encrypt_to=recipients)
        context.listener.start(attempt, context.channel, is_first=context.world.rank == 0)

    recipients: tuple[str, ...] = ()
    try:
        uploads.check(context.options.every, context.slower)
        if context.data_world is not None:
            for original, tracked in context.loaders:
                context.data_world.check(tracked.name, original)
        recipients = encryption.check(context.options)
        context.registry.exclude(context.options.exclude)
        reach = TierSet(
            context.tier,
            context.slower,
            context.options.accept_older,
            context.opener,
            encrypts=bool(context.options.encrypt_to),
        )
        with context.registry.unchanged():
            capture(context.registry)  # refuse an unstorable state now, not at the first save
            return begin(
                tier=context.tier,
                channel=context.channel,
                registry=context.registry,
                mode=mode,
                on_claimed=claimed,
                reach=reach,
            )
    except BaseException:
        context.crash_marker.stop()
        context.listener.end()
        raise


def _arenas(context: RankContext, beginning: ResumePoint) -> Arenas:
    """Build this rank's shared memory, one of those on its host."""
    reclaim()
    hosts = beginning.record.facts["hosts"]
    local = [rank for rank, host in enumerate(hosts) if host == context.world.host]
    budget = context.options.memory_budget
    newest = beginning.manifest.name.folder if beginning.manifest is not None else None
    return Arenas(context.tier.url, context.world.rank, local, budget, newest=newest)


def _saves_gradients(context: RankContext) -> bool:
    """Return True if saves by time may fall amid a window, as far as windows were seen by now."""
    every, micro_batches = (
        context.options.every,
        context.position.window or context.options.accumulate or 1,
    )
    return micro_batches > 1 and (every.auto or every.seconds is not None)


def _interval(context: RankContext, beginning: ResumePoint) -> Callable[[], float]:
    """Return a function for the seconds until the next automatic save; rank 0 requests it."""
    mean_s = PRIOR_S
    if context.options.every.auto and context.world.rank == 0:
        own = beginning.record.attempt
        before = [r for n, r in read_attempts(context.tier).items() if n < own]
        mean_s = mean_time_between_failures_s(before)

    def seconds() -> float:
        found = interval_s(context.timings.stall_s, context.timings.save_s, mean_s)
        if context.options.every.auto and context.timings.stall_s is not None:
            logger.debug("next save in %.0f s", found)
        return found

    return seconds


def _dump_pause(
    context: RankContext, facts: ManifestDefaults, saver: SaveCoordinator, *, lean: bool
) -> DumpPause:
    """Build the pause that lets the processes be dumped at a stop.

    Args:
        lean: True if nothing else reads the state while the training thread pauses.
    """
    drops = LeanDump(context.tier, facts.run, context.world, context.registry, saver.release_memory)
    context.hooks.before_dump.insert(0, saver.arenas.unlock_memory)
    position = context.position
    apart = Communicators(lambda: (position.cursor.step, position.cursor.micro))
    return DumpPause(
        channel=context.channel,
        hooks=context.hooks,
        number=facts.number,
        listener=context.listener,
        status_writer=context.status_writer,
        lean=drops if lean else None,
        communicators=apart,
    )


def _final_save(context: RankContext, saver: SaveCoordinator, beginning: ResumePoint) -> FinalSave:
    hosts = set(beginning.record.facts["hosts"])
    on_one_host = len(hosts) == 1 and isinstance(context.tier, LocalTier)
    if on_one_host and isinstance(context.tier, LocalTier):
        on_one_host = not is_remote(file_system(context.tier.root))
    parent = None
    if beginning.manifest is not None and beginning.cursor is not None:
        parent = str(beginning.manifest.name), beginning.cursor
    return FinalSave(
        channel=context.channel,
        saver=saver,
        estimator=context.estimator,
        requests=context.requests,
        parent=parent,
        host_goes=lambda: context.listener.machine_goes,
        on_one_host=on_one_host,
    )


def _arrive(context: RankContext, shutdown: Shutdown, beginning: ResumePoint) -> None:
    """Apply the snapshot; an error here counts as a death of the attempt on it."""
    assert beginning.manifest is not None
    assert beginning.saved is not None
    cursor = beginning.cursor
    assert cursor is not None
    try:
        first_loader = context.loaders[0][1] if context.loaders else None
        context.phased_restore.begin(
            beginning.saved, cursor, beginning.manifest.window, first_loader
        )
        context.files.resumed(beginning.saved, beginning.record.attempt)
    except BaseException as error:
        context.crash_marker.stop()
        shutdown.abandon(error, cursor)
        raise
