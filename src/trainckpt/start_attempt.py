"""Start an attempt: claim it, read its snapshot, build the objects that save and shut down.

`RankContext` holds the dependencies of one rank, from the Checkpointer's construction on. `Attempt`
holds the additional ones, once the attempt is claimed and the snapshot applied.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import fingerprint
from trainckpt.attempt.fingerprint import differences, take_fingerprint
from trainckpt.attempt.goodput import repeats_fact
from trainckpt.attempt.log import logger
from trainckpt.attempt.record_writer import AttemptId, RecordWriter
from trainckpt.attempt.status_files import CLAIMED, SUPERVISOR_VARIABLE
from trainckpt.attempt.time_keeper import trained_by
from trainckpt.dumping.communicators import Communicators
from trainckpt.dumping.lean_dump import LeanDump
from trainckpt.errors import ConfigurationError
from trainckpt.format.changes import RECORDED_CHANGES
from trainckpt.gc_pause import gc_paused
from trainckpt.inspect.load import put
from trainckpt.metrics import publisher
from trainckpt.metrics.publisher import MetricsPublisher
from trainckpt.metrics.run_readings import RunReadings
from trainckpt.ranks.store import RANKS_TIMEOUT_S, connect
from trainckpt.ranks.world import agree_on_name
from trainckpt.replicate import compile_cache, uploads
from trainckpt.replicate.replicator import set_up, set_up_local
from trainckpt.replicate.tier_uploader import TierUploader
from trainckpt.replicate.uploads import ArenaFirstReader, UploadContext, Uploads
from trainckpt.resume import script_changes
from trainckpt.resume.candidate_order import KEEP_LAST
from trainckpt.resume.exactness_report import (
    ResumeReport,
    not_deterministic,
    of_all_ranks,
    other_state,
    own_objects,
    said_after_loading,
    said_by_objects,
)
from trainckpt.resume.init_from import InitialWeights, read_initial
from trainckpt.resume.late_changes import ObservedCommit, ObservedWindows
from trainckpt.resume.resume import ResumePoint, begin, record_parent, record_refusal
from trainckpt.resume.script_values import given_by_script
from trainckpt.resume.start_log import log_start
from trainckpt.resume.weight_check import WeightCheck, recorded_digests
from trainckpt.run_directory.recorded_place import PLACE, place_of
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.run_directory.tier_set import TierSet
from trainckpt.save import encryption
from trainckpt.save.arenas import Arenas
from trainckpt.save.committer import ManifestDefaults
from trainckpt.save.coordinator import SaveCoordinator
from trainckpt.save.live_report import LiveReport
from trainckpt.save.replication_control import ReplicationControl
from trainckpt.save.schedule import SaveSchedule, measured_interval
from trainckpt.snapshot.attempt_history import read_attempts
from trainckpt.snapshot.decrypting_tier import KeyRing
from trainckpt.state.capture import capture
from trainckpt.stop.dump_pause import DumpPause
from trainckpt.stop.final_save import FinalSave
from trainckpt.stop.shutdown import Shutdown
from trainckpt.stop.stop_mode import StopModeChooser
from trainckpt.stop.survivor_setup import set_up as set_up_survivors
from trainckpt.storage.fs_probe import file_system, is_remote
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import reclaim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.attempt.options import DataWorld, Options
    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.attempt.script_hooks import Hooks
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.attempt.tracked_files import TrackedFiles
    from trainckpt.attempt.tracked_runs import TrackedRuns
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.exactness import Restored
    from trainckpt.ranks.store import RankStore
    from trainckpt.ranks.world import World
    from trainckpt.resume.apply_phases import PhasedRestore
    from trainckpt.resume.crash_marker import CrashMarker
    from trainckpt.run_directory.tier_config import TierConfig
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.save.estimates import SaveEstimator, Timings
    from trainckpt.save.schedule import SaveRequests
    from trainckpt.state.registry import Registry
    from trainckpt.stop.hard_exit import HardExit
    from trainckpt.stop.notice_listener import NoticeListener
    from trainckpt.stop.survivor_setup import SurvivorSetup
    from trainckpt.storage.base import RunTier, Tier


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Dependencies of one rank, independent of the attempt.

    Attributes:
        loaders: The owner's own list: a loader may be registered later.
        slower: The slower tiers named by the options.
        data_world: Groups of ranks with different data, if the script declares them.
        problems: Reasons against a bitwise resume found in the script's objects.
        git_commit: Of the script, asked for on rank 0 alone.
    """

    options: Options
    tier: RunTier
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
    runs: TrackedRuns
    hooks: Hooks
    slower: TierConfig
    data_world: DataWorld | None = None
    git_commit: GitCommit | None = None

    @cached_property
    def channel(self) -> RankStore:
        """Store between the ranks, with keys of this start alone. First use waits for all ranks."""
        return connect(self.world, agree_on_name(self.world))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's processes, on one rank, ready to train.

    Attributes:
        beginning: The attempt's starting point.
        observers: Of what is known only in training, on rank 0.
        survival: Setup for saves after other ranks die; None: no such saves.
    """

    beginning: ResumePoint
    record_writer: RecordWriter
    saver: SaveCoordinator
    report: ResumeReport
    shutdown: Shutdown
    schedule: SaveSchedule
    weight_check: WeightCheck
    observers: tuple[ObservedWindows | ObservedCommit, ...] = ()
    survival: SurvivorSetup | None = None


def start_attempt(context: RankContext, mode: str) -> Attempt:
    """Claim the next attempt, choose and read its snapshot, apply it. Every rank calls it.

    Raises:
        TrainckptError: as `Checkpointer.resume` documents, on every rank alike.
    """
    with context.status_writer.refusals(), gc_paused():
        try:
            return _build(context, _begin(context, mode))
        except BaseException:
            context.crash_marker.disarm()
            context.listener.end()
            raise


def _begin(context: RankContext, mode: str) -> ResumePoint:
    """Check the options against each other, claim the attempt, choose and read its snapshot."""
    options = context.options
    uploads.check(options.every, context.slower)
    if context.data_world is not None:
        for original, tracked in context.loaders:
            context.data_world.check(tracked.name, original)
    if options.init_from is None and (options.only or options.rename is not None):
        raise ConfigurationError(
            "only and rename choose among the weights of init_from, which is not given",
            hint='give init_from="RUN", or leave them out',
        )
    compile_cache.check(options)
    publisher.check(options.metrics)
    recipients = encryption.check(options)
    context.registry.exclude(options.exclude)
    reach = TierSet(
        context.tier,
        context.slower,
        options.accept_older,
        KeyRing(options.identity),
        encrypts=bool(options.encrypt_to),
    )

    def claimed(record: AttemptRecord) -> None:
        attempt = record.attempt
        context.crash_marker.arm(attempt)
        if context.world.rank == 0:
            context.timings.times.share(context.tier.url, attempt)
        context.status_writer.update(state=CLAIMED, attempt=attempt, encrypt_to=recipients)
        stop_mode = StopModeChooser(
            options=options,
            registry=context.registry,
            position=context.position,
            timings=context.timings,
            world_size=context.world.size,
            ranks_here=record.facts["hosts"].count(context.world.host),
        )
        context.listener.start(attempt, context.channel, stop_mode)

    with context.registry.unchanged():
        given = given_by_script(context.registry, options, context.git_commit)
        capture(context.registry)  # refuse an unstorable state now, not at the first save
        return begin(
            tier=context.tier,
            channel=context.channel,
            registry=context.registry,
            mode=mode,
            on_claimed=claimed,
            reach=reach,
            given=given,
            commit=context.git_commit,
            times=context.timings.times,
        )


def _build(context: RankContext, beginning: ResumePoint) -> Attempt:
    """Build the attempt's objects, in the order of their dependencies, and apply the snapshot."""
    options, registry, manifest = context.options, context.registry, beginning.manifest
    hosts = beginning.record.facts["hosts"]
    environment, reaches = _describe_ranks(context)
    times = context.timings.times
    times.add_restore(beginning.read_s, beginning.sources)
    record_writer = RecordWriter(
        context.tier, beginning.record, writes=context.world.rank == 0, times=times
    )
    initial = _record_beginning(context, beginning, record_writer)
    defaults = ManifestDefaults(
        beginning.run,
        AttemptId(beginning.record.attempt),
        str(manifest.name) if manifest is not None else None,
        environment,
        options.keep_last,
    )
    snapshot_encryption = encryption.set_up(options, context.channel, beginning.run)
    saver = _build_saver(context, beginning, record_writer, defaults, snapshot_encryption)
    survival = set_up_survivors(
        options=options,
        channel=context.channel,
        tier=context.tier,
        registry=registry,
        defaults=defaults,
        saver=saver,
        hard_exit=context.hard_exit,
        hosts=hosts,
        status_writer=context.status_writer,
        encryption=snapshot_encryption,
    )
    parts = _inexact_parts(context, beginning, environment)
    report = ResumeReport(
        channel=context.channel,
        registry=registry,
        is_resumed=manifest is not None,
        restored=[*context.problems, *parts] if manifest is not None else [],
    )
    dump_pause = None
    if len(set(hosts)) == 1 and SUPERVISOR_VARIABLE in os.environ:
        # This host has no key to read an encrypted snapshot back.
        is_lean = survival is None and snapshot_encryption is None
        dump_pause = _dump_pause(context, defaults, saver, lean=is_lean)
    shutdown = Shutdown(
        options=options,
        channel=context.channel,
        saver=saver,
        final_save=_build_final_save(context, beginning, saver),
        listener=context.listener,
        hard_exit=context.hard_exit,
        record_writer=record_writer,
        times=times,
        report=report,
        status_writer=context.status_writer,
        requests=context.requests,
        loaders=context.loaders,
        where=lambda: context.position.cursor,
        survival=survival,
        dump_pause=dump_pause,
    )
    if manifest is not None:
        if encryption.may_refer(snapshot_encryption, manifest):
            saver.references.begin_from(manifest, beginning.reader)
            if snapshot_encryption is not None:
                snapshot_encryption.allow_references(manifest)
        begun_s = time.monotonic()
        _apply(context, shutdown, beginning)
        times.add_restore(time.monotonic() - begun_s)
        parts = [*context.problems, *parts, *said_after_loading(registry, beginning)]
        report.set_restored(of_all_ranks(context.channel, parts))
    if context.world.rank == 0:
        _log_start(context, beginning, report, initial)
    schedule = _build_schedule(context, beginning)
    live_report = LiveReport(
        saver=saver, schedule=schedule, timings=context.timings, position=context.position
    )
    context.listener.complete_status = live_report.complete
    if beginning.saved is not None:  # only `PhasedRestore` needs it, until the first batch
        beginning = replace(beginning, saved=beginning.saved.without_state(), reader=None)
    beginning = replace(beginning, before={})
    if manifest is not None:
        saver.replication.begin_from([context.tier, *context.slower.tiers], manifest)
    saver.uploads.start()
    _publish_metrics(context, beginning, record_writer, saver, schedule)
    _keep_compile_cache(context, beginning, shutdown, reaches)
    weight_check = _build_weight_check(context, beginning, record_writer, report)
    return Attempt(
        beginning=beginning,
        record_writer=record_writer,
        saver=saver,
        report=report,
        shutdown=shutdown,
        schedule=schedule,
        weight_check=weight_check,
        observers=_build_observers(context, beginning, record_writer, report),
        survival=survival,
    )


def _publish_metrics(
    context: RankContext,
    beginning: ResumePoint,
    record_writer: RecordWriter,
    saver: SaveCoordinator,
    schedule: SaveSchedule,
) -> None:
    """Publish metrics of the attempt from rank 0, if the options say where; never of a proof."""
    target, manifest = context.options.metrics, beginning.manifest
    if target is None or context.world.rank != 0 or PROVE_VARIABLE in os.environ:
        return
    readings = RunReadings(
        tier=context.tier,
        record_writer=record_writer,
        timings=context.timings,
        saver=saver,
        schedule=schedule,
        status=context.listener.live_status,
        grace_s=context.listener.grace_s,
        durable=context.slower.durable,
        begun_from=None if manifest is None else (str(manifest.name), manifest.created),
        damaged=beginning.damaged,
    )
    context.listener.metrics = metrics = MetricsPublisher(target, readings, context.tier.url)
    metrics.start()


def _keep_compile_cache(
    context: RankContext, beginning: ResumePoint, shutdown: Shutdown, reaches: Sequence[str]
) -> None:
    """Fetch the command's compile caches where the options say so, and upload them beside training.

    `reaches`: the option of each rank. Collective. Before the first batch, since that compiles.
    """
    tiers: list[Tier] = [context.tier, *context.slower.tiers]
    tiers.sort(key=lambda tier: tier.name != context.slower.durable)
    hosts, begun_step = beginning.record.facts["hosts"], context.position.step
    folder = compile_cache.set_up(reaches, context.channel, hosts, tiers)
    if folder is not None:
        compile_cache.CompileCacheUpload(
            tiers[0],
            folder,
            num_steps=lambda: context.position.step - begun_step,
            is_over=lambda: shutdown.left,
        ).start()


def _log_start(
    context: RankContext,
    beginning: ResumePoint,
    report: ResumeReport,
    initial: InitialWeights | None,
) -> None:
    log_start(
        options=context.options,
        tier=context.tier,
        registry=context.registry,
        beginning=beginning,
        exactness=report.exactness,
        initial=initial,
        data_world=context.data_world,
    )
    if logger.isEnabledFor(logging.DEBUG):  # the description weighs the whole state
        grace_s = context.listener.grace_s
        within = "" if grace_s is None else f", within {grace_s:g} s of a signal"
        logger.debug("a stop falls on %s%s", context.listener.stop_mode.describe(), within)


def _build_schedule(context: RankContext, beginning: ResumePoint) -> SaveSchedule:
    return SaveSchedule(
        context.options.every,
        context.position.step,
        time.monotonic(),
        measured_interval(context.timings, _earlier_attempts(context, beginning)),
        context.options.memory_every,
    )


def _build_observers(
    context: RankContext,
    beginning: ResumePoint,
    record_writer: RecordWriter,
    report: ResumeReport,
) -> tuple[ObservedWindows | ObservedCommit, ...]:
    if context.git_commit is None or beginning.script is None:
        return ()
    return (
        ObservedWindows(beginning.script, record_writer, report, context.position.step),
        ObservedCommit(beginning.script, record_writer, context.git_commit),
    )


def _build_weight_check(
    context: RankContext,
    beginning: ResumePoint,
    record_writer: RecordWriter,
    report: ResumeReport,
) -> WeightCheck:
    """Build the check of later weights; on rank 0, read the digests to compare them with."""
    manifest, is_first = beginning.manifest, context.world.rank == 0
    expected: dict[int, str] = {}
    is_same_layout = beginning.saved is not None and beginning.saved.exact
    changes = beginning.script.changes if beginning.script is not None else ()
    is_same_training = is_same_layout and not any(each.trains_otherwise for each in changes)
    if is_first and manifest is not None and is_same_training:
        expected = recorded_digests(context.tier, manifest.name.attempt, manifest.cursor.step)
    return WeightCheck(
        registry=context.registry,
        record_writer=record_writer,
        report=report,
        records=is_first,
        expected=expected,
        recorded_by=manifest.name.attempt if manifest is not None else 0,
    )


def _describe_ranks(context: RankContext) -> tuple[dict[str, Any], list[str]]:
    """Return the fingerprint of all ranks' software and devices, and the option `compile_cache` of
    each rank. Collective: one round for both."""
    devices = context.registry.devices()
    own = fingerprint.describe(fingerprint.training_devices(devices))
    mine = [own, context.options.compile_cache]
    everyone = context.channel.gather("devices", mine, RANKS_TIMEOUT_S)
    texts = [text for text, _ in everyone]
    reaches = [reach for _, reach in everyone]
    return take_fingerprint(context.world.size, devices, texts), reaches


def _record_beginning(
    context: RankContext, beginning: ResumePoint, record_writer: RecordWriter
) -> InitialWeights | None:
    """Record what the attempt begins from; return the initial weights, if it loads any."""
    manifest = beginning.manifest
    if manifest is not None:
        encryption.check_stays_encrypted(manifest, context.options)
    initial = _read_initial(context, beginning)
    parent = str(manifest.name) if manifest is not None else None
    context.timings.times.begin_at(beginning.cursor)
    facts = _facts(context, initial, beginning)
    if context.world.rank == 0:
        own = beginning.record.with_(parent=parent)
        facts |= repeats_fact(beginning.before, own, trained_by(beginning.cursor))
    record_parent(context.channel, record_writer, parent, facts)
    if initial is not None:
        put(initial.loading)
        for engine in context.registry.engines:
            engine.refresh()
    return initial


def _build_saver(
    context: RankContext,
    beginning: ResumePoint,
    record_writer: RecordWriter,
    defaults: ManifestDefaults,
    snapshot_encryption: SnapshotEncryption | None,
) -> SaveCoordinator:
    """Build the coordinator of saves, with its arenas, uploads and replication."""
    options, channel, url = context.options, context.channel, context.tier.url
    manifest, hosts = beginning.manifest, beginning.record.facts["hosts"]
    reclaim()
    arenas = Arenas(
        url,
        context.world.rank,
        [rank for rank, host in enumerate(hosts) if host == context.world.host],
        options.memory_budget,
        newest=manifest.name.folder if manifest is not None else None,
    )
    return SaveCoordinator(
        tier=context.tier,
        channel=channel,
        registry=context.registry,
        defaults=defaults,
        record_writer=record_writer,
        timings=context.timings,
        arenas=arenas,
        window_start=context.position.window_start,
        encryption=snapshot_encryption,
        uploads=_uploads(context, arenas, record_writer, defaults, beginning),
        replication=ReplicationControl(
            arenas,
            context.world.rank,
            set_up(options, channel, url, hosts),
            partial(set_up_local, channel, url, hosts),
        ),
        saves_gradients=partial(_saves_gradients, context),
        blocks_step=options.memory_every.steps == 1,
    )


def _inexact_parts(
    context: RankContext, beginning: ResumePoint, environment: dict[str, Any]
) -> list[Restored]:
    """Return the parts that the snapshot cannot restore exactly; none at step 0."""
    if beginning.manifest is None:
        return []
    changes = beginning.script.changes if beginning.script is not None else ()
    return [
        *script_changes.restored(changes),
        *other_state(beginning, own_objects(context.registry)),
        *said_by_objects(context.registry, beginning),
        *not_deterministic(environment),
        *differences(beginning.manifest.fingerprint, environment),
    ]


def _build_final_save(
    context: RankContext, beginning: ResumePoint, saver: SaveCoordinator
) -> FinalSave:
    """Build the final save, of a stop or of the run's end."""
    manifest, cursor, tier = beginning.manifest, beginning.cursor, context.tier
    is_on_one_host = (
        len(set(beginning.record.facts["hosts"])) == 1
        and isinstance(tier, LocalTier)
        and not is_remote(file_system(tier.root))
    )
    return FinalSave(
        channel=context.channel,
        saver=saver,
        estimator=context.estimator,
        requests=context.requests,
        parent=(str(manifest.name), cursor) if manifest is not None and cursor else None,
        host_goes=lambda: context.listener.machine_goes,
        on_one_host=is_on_one_host,
    )


def _read_initial(context: RankContext, beginning: ResumePoint) -> InitialWeights | None:
    """Read the initial weights of `init_from` at step 0; compared on all ranks."""
    if beginning.manifest is not None or context.options.init_from is None:
        return None
    begun_s = time.monotonic()
    try:
        return read_initial(
            context.options.init_from,
            context.registry,
            context.channel,
            only=context.options.only,
            rename=context.options.rename,
        )
    except BaseException as error:
        if context.world.rank == 0:
            record_refusal(context.tier, beginning.record, error, time.monotonic() - begun_s)
        raise


def _facts(
    context: RankContext, initial: InitialWeights | None, beginning: ResumePoint
) -> dict[str, Any]:
    """Return options, and what the script gives, to store in the attempt's record."""
    facts: dict[str, Any] = {KEEP_LAST: context.options.keep_last, PLACE: place_of(context.tier)}
    facts |= context.slower.to_facts()
    if (script := beginning.script) is not None:
        facts[script_changes.FACT] = dict(script.script)
        if script.changes:
            facts[RECORDED_CHANGES] = [each.to_json() for each in script.changes]
    if initial is not None:
        facts["init_from"] = initial.source
    if context.options.exclude:
        facts["exclude"] = list(context.options.exclude)
    if context.data_world is not None:
        facts["data_ranks"] = context.data_world.size
    return facts


def _uploads(
    context: RankContext,
    arenas: Arenas,
    record_writer: RecordWriter,
    defaults: ManifestDefaults,
    beginning: ResumePoint,
) -> Uploads:
    """Build the uploads of this attempt's snapshots to the slower tiers."""
    copy_from = None if context.options.encrypt_to else arenas.copy_from
    work = UploadContext(
        run_tier=context.tier,
        arena_first=ArenaFirstReader(context.tier, copy_from),
        channel=context.channel,
        record_writer=record_writer,
        run=defaults.run,
        number=defaults.number,
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


def _saves_gradients(context: RankContext) -> bool:
    """Return True if saves by time may fall amid a window, as far as windows were seen by now."""
    every = context.options.every
    micro_batches = context.position.window or context.options.accumulate or 1
    return micro_batches > 1 and (every.auto or every.seconds is not None)


def _earlier_attempts(context: RankContext, beginning: ResumePoint) -> list[AttemptRecord]:
    """Return the records that the interval of automatic saves follows from, where it is needed."""
    if not context.options.every.auto or context.world.rank != 0:
        return []
    own = beginning.record.attempt
    return [record for n, record in read_attempts(context.tier).items() if n < own]


def _dump_pause(
    context: RankContext, defaults: ManifestDefaults, saver: SaveCoordinator, *, lean: bool
) -> DumpPause:
    """Build the pause that lets the processes be dumped at a stop.

    Args:
        lean: True if nothing else reads the state while the training thread pauses.
    """
    tier, registry, position = context.tier, context.registry, context.position
    drops = LeanDump(tier, defaults.run, context.world, registry, saver.release_memory)
    context.hooks.before_dump.insert(0, saver.arenas.unlock_memory)
    return DumpPause(
        channel=context.channel,
        hooks=context.hooks,
        number=defaults.number,
        listener=context.listener,
        status_writer=context.status_writer,
        lean=drops if lean else None,
        communicators=Communicators(lambda: (position.cursor.step, position.cursor.micro)),
    )


def _apply(context: RankContext, shutdown: Shutdown, beginning: ResumePoint) -> None:
    """Apply the snapshot; an error here counts as a death of the attempt on it."""
    saved, cursor, manifest = beginning.saved, beginning.cursor, beginning.manifest
    assert saved is not None
    assert cursor is not None
    assert manifest is not None
    try:
        first_loader = context.loaders[0][1] if context.loaders else None
        context.phased_restore.begin(saved, cursor, manifest.window, first_loader)
        context.files.resumed(saved, beginning.record.attempt)
        context.runs.resumed(saved)
    except BaseException as error:
        context.crash_marker.disarm()
        shutdown.abandon(error, cursor)
        raise
