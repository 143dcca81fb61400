"""An attempt sets out: claim it, read what it begins from, make ready whoever will save and leave.

crew      what one rank of a run has from the Checkpointer's construction on
attempt   what it has in addition once the attempt is claimed and the snapshot applied
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.lifecycle.deciding import tier_interval
from trainckpt.lifecycle.deciding.interval import PRIOR_S, interval_s, mean_time_between_failures_s
from trainckpt.lifecycle.deciding.policy import Policy
from trainckpt.lifecycle.dumping.communicators import Communicators
from trainckpt.lifecycle.dumping.lean import Lean
from trainckpt.lifecycle.flushing.flush_work import Near, Work
from trainckpt.lifecycle.flushing.flusher import Flusher
from trainckpt.lifecycle.flushing.flushing import Flushing
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.places.reach import Reach
from trainckpt.lifecycle.places.slower import WHERE, Slower, where
from trainckpt.lifecycle.reading.load import put
from trainckpt.lifecycle.reasons import (
    not_deterministic,
    of_all_ranks,
    other_state,
    own_objects,
    said_after_loading,
    said_by_objects,
)
from trainckpt.lifecycle.resuming.announce import say_how_it_stops, say_where
from trainckpt.lifecycle.resuming.choice import KEEP_LAST
from trainckpt.lifecycle.resuming.initial import Initial, read_initial
from trainckpt.lifecycle.resuming.resume import Beginning, begin, record_parent, record_refusal
from trainckpt.lifecycle.run import gpu_settings, held, launch
from trainckpt.lifecycle.run.attempt_log import AttemptLog
from trainckpt.lifecycle.run.attempt_number import AttemptNumber
from trainckpt.lifecycle.run.error_json import together
from trainckpt.lifecycle.run.fingerprint import differences, fingerprint
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.misspelt import misspelt
from trainckpt.lifecycle.run.no_collections import no_collections
from trainckpt.lifecycle.run.told import CLAIMED, SUPERVISOR_VARIABLE
from trainckpt.lifecycle.saving import sealing
from trainckpt.lifecycle.saving.arenas import Arenas
from trainckpt.lifecycle.saving.domains import on_this_host, set_up
from trainckpt.lifecycle.saving.saver import Saver
from trainckpt.lifecycle.saving.writer import Facts
from trainckpt.lifecycle.stopping.departure import Departure
from trainckpt.lifecycle.stopping.last_save import LastSave
from trainckpt.lifecycle.stopping.rest import Rest
from trainckpt.lifecycle.stopping.survival import set_up as survive
from trainckpt.ranks.channel import connect
from trainckpt.ranks.start_name import agree_on_name
from trainckpt.snapshot.attempts import read_attempts
from trainckpt.snapshot.opened import Opener
from trainckpt.state.capture import capture, must_be_storable
from trainckpt.state.weight import weigh
from trainckpt.tiers.capabilities import file_system, free_bytes, is_remote
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import reclaim

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.format.exactness import Restored
    from trainckpt.lifecycle.deciding.outlook import Outlook
    from trainckpt.lifecycle.deciding.pace import Pace
    from trainckpt.lifecycle.resuming.arrival import Arrival
    from trainckpt.lifecycle.resuming.last_words import LastWords
    from trainckpt.lifecycle.run.data_world import DataWorld
    from trainckpt.lifecycle.run.hooks import Hooks
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.lifecycle.run.position import Position
    from trainckpt.lifecycle.run.told import Teller
    from trainckpt.lifecycle.run.tracked_files import TrackedFiles
    from trainckpt.lifecycle.saving.requests import Requests
    from trainckpt.lifecycle.saving.sealing import Sealing
    from trainckpt.lifecycle.stopping.survival import Survival
    from trainckpt.lifecycle.stopping.watch import Watch
    from trainckpt.ranks.channel import Channel
    from trainckpt.ranks.world import World
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.places import Place


@dataclass(frozen=True)
class Crew:
    """Who works for a run on one rank, whatever the attempt.

    Attributes:
        loaders: The owner's own list: a loader may be registered later.
        slower: The slower tiers that its options name.
        data_world: Which ranks see different data, where the script says so.
        problems: Why a resume cannot be bitwise, as far as the script's objects show it.
    """

    options: Options
    tier: Place
    world: World
    registry: Registry
    position: Position
    pace: Pace
    outlook: Outlook
    arrival: Arrival
    watch: Watch
    teller: Teller
    requests: Requests
    loaders: list[tuple[Any, TrackedLoader]]
    problems: list[Restored]
    last_words: LastWords
    files: TrackedFiles
    hooks: Hooks
    slower: Slower
    data_world: DataWorld | None = None

    @cached_property
    def channel(self) -> Channel:
        """Between the ranks, with keys of this start alone. The first use waits for all ranks."""
        return connect(self.world, agree_on_name(self.world))

    @cached_property
    def opener(self) -> Opener:
        """Who reads what is encrypted."""
        return Opener(self.options.identity)


@dataclass(frozen=True)
class Attempt:
    """One start of a run's processes, on one rank, ready to train.

    Attributes:
        beginning: From where it began.
        survival: What it does in case others die; None: nothing.
    """

    beginning: Beginning
    log: AttemptLog
    saver: Saver
    departure: Departure
    policy: Policy
    survival: Survival | None = None

    @property
    def number(self) -> int:
        """From 1."""
        return self.beginning.record.attempt

    def begin_window(self, position: Position, *, resumable: bool) -> None:
        """At each boundary: keep the state of a window's beginning, in case other ranks die."""
        if self.survival is not None and resumable and not position.micro:
            self.survival.note(position.cursor)

    def must_be_able_to_save(self, crew: Crew, *, at_first: bool) -> None:
        """Refuse a state that no save could store, and warn where there is no room for it.

        At the first boundary, and at the first after a step: not only when all is trained. Ranks
        refuse together at the first one, which all of them pass. After it one rank alone is told,
        since others might wait for it in vain: the next save fails on all, and says why.

        Args:
            crew: Of this rank.
            at_first: This is the first boundary.

        Raises:
            ConfigurationError: something tracked has a state that cannot be stored; by name.
        """
        if at_first or crew.world.size == 1:
            check = partial(must_be_storable, crew.registry)
            together(crew.channel, f"storable/{int(at_first)}", check, RANKS_TIMEOUT_S)
        else:
            try:
                must_be_storable(crew.registry)
            except ConfigurationError as error:
                logger.error("no checkpoint can be saved: %s; next: %s", error.message, error.hint)
        is_first = crew.world.rank == 0
        if not (is_first and isinstance(crew.tier, LocalTier)) or crew.options.exclude:
            return
        with contextlib.suppress(OSError):
            needed, free = weigh(crew.registry, gradients=False).state, free_bytes(crew.tier.root)
            if 0 <= free < needed:
                logger.error(
                    "%s has %.1f MB left, and a checkpoint needs %.1f MB: unless space is freed, "
                    "nothing can be saved there", crew.tier.url, free / 1e6, needed / 1e6,
                )  # fmt: skip

    @property
    def resumed_from(self) -> Cursor | None:
        """The cursor it went on from, or None if it began at step 0."""
        return self.beginning.cursor


def set_out(crew: Crew, mode: str) -> Attempt:
    """Claim the next attempt, choose and read its snapshot, apply it. Every rank calls it.

    Raises:
        TrainckptError: as `Checkpointer.resume` says, on every rank alike.
    """
    with crew.teller.refusals(), no_collections():
        beginning = _begin(crew, mode)
        try:
            return _make_ready(crew, beginning)
        except BaseException:
            crew.last_words.stop()
            crew.watch.end()
            raise


def _make_ready(crew: Crew, beginning: Beginning) -> Attempt:
    devices = crew.registry.devices()
    own = gpu_settings.describe(gpu_settings.training_devices(devices))
    everyone = crew.channel.gather("devices", own, RANKS_TIMEOUT_S)
    here = fingerprint(crew.world.size, devices, everyone)
    parent = str(beginning.manifest.name) if beginning.manifest else None
    log = AttemptLog(crew.tier, beginning.record, writes=crew.world.rank == 0)
    if beginning.manifest is not None:
        sealing.must_say_so(beginning.manifest, crew.options)
    initial = _read_initial(crew, beginning)
    record_parent(crew.channel, log, parent, _chosen(crew, initial))
    if initial is not None:
        put(initial.loading)
    number = AttemptNumber(beginning.record.attempt)
    facts = Facts(beginning.run, number, parent, here, crew.options.keep_last)
    seals = sealing.set_up(crew.options, crew.channel, beginning.run)
    saver = Saver(
        crew.tier, crew.channel, crew.registry, facts, log, crew.pace, _arenas(crew, beginning),
        crew.position.window_start, seals, saves_gradients=partial(_saves_gradients, crew),
    )  # fmt: skip
    saver.holds_steps = crew.options.memory_every.steps == 1
    saver.flushing = _flushing(crew, saver, log, facts, beginning)
    hosts = beginning.record.facts["hosts"]
    saver.protecting.protection = set_up(crew.options, crew.channel, crew.tier.url, hosts)
    saver.protecting.on_this_host = partial(on_this_host, crew.channel, crew.tier.url, hosts)
    departure = _departure(crew, saver, log)
    survival = survive(
        crew.options, crew.channel, crew.tier, crew.registry, facts, saver, departure, hosts,
        crew.teller, seals,
    )  # fmt: skip
    departure.survival = survival
    if len(set(hosts)) == 1 and SUPERVISOR_VARIABLE in os.environ:
        # What is encrypted nobody here can read back.
        departure.rest = _rest(crew, facts, saver, lean=survival is None and seals is None)
    if beginning.manifest is not None:
        parts = other_state(beginning, own_objects(crew)) + said_by_objects(crew, beginning)
        parts += not_deterministic(here) + differences(beginning.manifest.fingerprint, here)
        departure.restored = (*crew.problems, *parts)
        _refer(saver, seals, beginning)
        _arrive(crew, departure, beginning, parent)
        parts = [*crew.problems, *parts, *said_after_loading(crew, beginning)]
        departure.restored = tuple(of_all_ranks(crew.channel, parts))
    if crew.world.rank == 0:
        say_where(crew.tier, beginning, departure.exactness, crew.registry)
        _say_what_was_chosen(crew, initial)
        lost = launch.missing_supervisor(os.environ)
        say_how_it_stops(crew.outlook.in_words(), crew.watch.grace_s, lost)
    policy = Policy(
        crew.options.every, crew.position.step, time.monotonic(), _interval(crew, beginning),
        crew.options.memory_every,
    )  # fmt: skip
    if beginning.saved is not None:  # the arrival has it until the first batch, and nobody after
        beginning = replace(beginning, saved=beginning.saved.without_state(), reader=None)
    if beginning.manifest is not None:
        saver.protecting.begin_from([crew.tier, *crew.slower.tiers], beginning.manifest)
    saver.flushing.start()
    return Attempt(beginning, log, saver, departure, policy, survival)


def _refer(saver: Saver, seals: Sealing | None, beginning: Beginning) -> None:
    """What is written may refer to the snapshot that the attempt began from, if both are encrypted
    to the same, or neither: else what should not be readable would be, or the other way round."""
    manifest = beginning.manifest
    assert manifest is not None
    if not sealing.may_refer(seals, manifest):
        return
    saver.references.begin_from(manifest, beginning.reader)
    if seals is not None:
        seals.begin_from(manifest)


def _flushing(
    crew: Crew, saver: Saver, log: AttemptLog, facts: Facts, beginning: Beginning
) -> Flushing:
    """Who copies this attempt's snapshots to the slower tiers."""
    copy_from = None if crew.options.encrypt_to else saver.arenas.copy_from
    near = Near(crew.tier, copy_from)
    work = Work(crew.tier, near, crew.channel, log, facts.run, facts.number, crew.options.keep_last)
    durable, every = crew.slower.durable, crew.options.every
    step = beginning.cursor.step if beginning.cursor is not None else 0
    flushers = [
        Flusher(
            tier,
            work,
            number,
            is_durable=tier.name == durable,
            every=tier_interval.interval_of(every, tier),
            begun_step=step,
        )
        for number, tier in enumerate(crew.slower.tiers)
    ]
    return Flushing(flushers, durable)


def _read_initial(crew: Crew, beginning: Beginning) -> Initial | None:
    """At step 0, with `init_from`: the weights to begin with, read and compared on all ranks."""
    if beginning.manifest is not None or crew.options.init_from is None:
        return None
    begun_s = time.monotonic()
    try:
        return read_initial(crew.options.init_from, crew.registry, crew.channel)
    except BaseException as error:
        if crew.world.rank == 0:
            record_refusal(crew.tier, beginning.record, error, time.monotonic() - begun_s)
        raise


def _chosen(crew: Crew, initial: Initial | None) -> dict[str, Any]:
    """What the attempt's record says of the options."""
    found: dict[str, Any] = {KEEP_LAST: crew.options.keep_last, WHERE: where(crew.tier)}
    found |= crew.slower.to_facts()
    if initial is not None:
        found["init_from"] = initial.source
    if crew.options.exclude:
        found["exclude"] = list(crew.options.exclude)
    if crew.data_world is not None:
        found["data_ranks"] = crew.data_world.size
    return found


def _say_what_was_chosen(crew: Crew, initial: Initial | None) -> None:
    for sentence in misspelt(os.environ):
        logger.warning(sentence)
    if initial is not None:
        logger.info("weights and buffers are those of %s", initial.source)
    if excluded := sum(len(model.excluded) for model in crew.registry.models):
        by = ", ".join(crew.options.exclude)
        logger.info("%d tensors are not saved, by exclude: %s", excluded, by)
    if crew.data_world is not None:
        logger.info("the data is dealt to %s", crew.data_world)


def _begin(crew: Crew, mode: str) -> Beginning:
    def claimed(attempt: int) -> None:
        crew.last_words.listen(attempt)
        crew.teller.tell(state=CLAIMED, attempt=attempt, encrypt_to=recipients)
        crew.watch.start(attempt, crew.channel, is_first=crew.world.rank == 0)

    recipients: tuple[str, ...] = ()
    try:
        tier_interval.check(crew.options.every, crew.slower)
        if crew.data_world is not None:
            for original, tracked in crew.loaders:
                crew.data_world.check(tracked.name, original)
        recipients = sealing.check(crew.options)
        crew.registry.exclude(crew.options.exclude)
        reach = Reach(
            crew.tier, crew.slower, crew.options.accept_older, crew.opener,
            encrypts=bool(crew.options.encrypt_to),
        )  # fmt: skip
        with crew.registry.unchanged():
            capture(crew.registry)  # what cannot be stored is refused now, not at the first save
            return begin(crew.tier, crew.channel, crew.registry, mode, claimed, reach)
    except BaseException:
        crew.last_words.stop()
        crew.watch.end()
        raise


def _arenas(crew: Crew, beginning: Beginning) -> Arenas:
    """The memory of this rank, among those of its host."""
    reclaim()
    hosts = beginning.record.facts["hosts"]
    local = [rank for rank, host in enumerate(hosts) if host == crew.world.host]
    budget = crew.options.memory_budget
    arenas = Arenas(crew.tier.url, crew.world.rank, local, budget, held.holder())
    if beginning.manifest is not None:
        arenas.newest = beginning.manifest.name.folder
    return arenas


def _saves_gradients(crew: Crew) -> bool:
    """Return True if saves by time may fall amid a window, as far as windows were seen by now."""
    every, micro_batches = crew.options.every, crew.position.window or crew.options.accumulate or 1
    return micro_batches > 1 and (every.auto or every.seconds is not None)


def _interval(crew: Crew, beginning: Beginning) -> Callable[[], float]:
    """How long until the next save, where nobody says; rank 0 is the one that asks for it."""
    mean_s = PRIOR_S
    if crew.options.every.auto and crew.world.rank == 0:
        own = beginning.record.attempt
        before = [r for n, r in read_attempts(crew.tier).items() if n < own]
        mean_s = mean_time_between_failures_s(before)

    def seconds() -> float:
        found = interval_s(crew.pace.stall_s, crew.pace.save_s, mean_s)
        if crew.options.every.auto and crew.pace.stall_s is not None:
            logger.info("next save in %.0f s", found)
        return found

    return seconds


def _rest(crew: Crew, facts: Facts, saver: Saver, *, lean: bool) -> Rest:
    """Who lets the processes be dumped at a stop.

    Args:
        lean: Nothing else reads the state while the training thread rests.
    """
    drops = Lean(crew.tier, facts.run, crew.world, crew.registry, saver.rest)
    crew.hooks.before_dump.insert(0, saver.arenas.unlock)
    position = crew.position
    apart = Communicators(lambda: (position.cursor.step, position.cursor.micro))
    return Rest(
        crew.channel, crew.hooks, facts.number, crew.watch, crew.teller, drops if lean else None,
        apart,
    )  # fmt: skip


def _departure(crew: Crew, saver: Saver, log: AttemptLog) -> Departure:
    hosts = set(log.record.facts["hosts"])
    on_one_host = len(hosts) == 1 and isinstance(crew.tier, LocalTier)
    if on_one_host and isinstance(crew.tier, LocalTier):
        on_one_host = not is_remote(file_system(crew.tier.root))
    last_save = LastSave(crew.channel, saver, crew.outlook, crew.requests, on_one_host=on_one_host)
    departure = Departure(
        crew.options, crew.channel, last_save, crew.watch, log, crew.teller, crew.requests,
        crew.loaders, lambda: crew.position.cursor,
    )  # fmt: skip
    last_save.goes_here = lambda: crew.watch.machine_goes
    crew.watch.on_failed = departure.cut_short
    return departure


def _arrive(crew: Crew, departure: Departure, beginning: Beginning, parent: str | None) -> None:
    """Apply the snapshot; an error in here counts as one that the attempt died of."""
    assert beginning.manifest is not None
    assert beginning.saved is not None
    cursor = beginning.cursor
    assert cursor is not None
    departure.began_from(parent, cursor)
    try:
        first_loader = crew.loaders[0][1] if crew.loaders else None
        crew.arrival.begin(beginning.saved, cursor, beginning.manifest.window, first_loader)
        crew.files.resumed(beginning.saved, beginning.record.attempt)
    except BaseException as error:
        crew.last_words.stop()
        departure.abandon(error, cursor)
        raise
