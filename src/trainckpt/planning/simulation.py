"""Simulate one training job under faults, as discrete events in simpy.

    training    goes on from save to save; a save stalls it, and its copies go on beside it
    faults      strike at any time, also while the job restarts: then it restarts again
    restart     wait for the processes or for spare hosts, choose the newest snapshot that is left,
                read it, go on from its step
    store       one link that saves and restores share; a fault of kind "store" stops it for a while

One event is a save, a fault or the end of a copy, never a step of a GPU, so 100,000 GPUs take as
long as 16. What a fault leaves follows from the hosts that it takes: memory survives the end of a
process, a partner's copy the loss of its host, and the store everything.

Assumed: a copy under way is lost by every fault; copies slow no step; a restore makes the copies on
replaced hosts anew before the next fault; the store serves no other job.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, cast

from trainckpt.errors import ConfigurationError
from trainckpt.planning.faults import CLUSTER, RANK, STORE, SWITCH
from trainckpt.planning.save_systems import MEMORY, SHARED
from trainckpt.planning.shared_link import SharedLink

try:
    import simpy
except ImportError as error:
    raise ConfigurationError(
        "the simulator needs the package simpy, which is not installed",
        hint="pip install 'trainckpt[planning]'",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from simpy.events import Event

    from trainckpt.planning.cluster import Cluster
    from trainckpt.planning.faults import Fault, FaultModel
    from trainckpt.planning.save_systems import SavedLevel, SaveSystem
    from trainckpt.planning.shared_link import Transfer

    Waiting = Generator[Event, Any, Any]

ROUNDING = 1e-6  # of a step
START = "start"  # step 0, which every run can begin again


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """Outcome of one simulated job. The five times add up to the wall time.

    Attributes:
        steps: Completed at the end, each counted once.
        training_s: Time of those steps.
        rework_s: Training that a fault lost.
        stall_s: Training that waited for saves.
        restore_s: Reading snapshots.
        downtime_s: From a fault until processes on all hosts begin to restore.
        faults: Kind -> how many.
        restores: Place of the snapshot -> how many; `START` if there was none.
    """

    steps: int
    training_s: float
    rework_s: float
    stall_s: float
    restore_s: float
    downtime_s: float
    faults: dict[str, int] = field(default_factory=dict)
    restores: dict[str, int] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """Return the whole time."""
        return self.training_s + self.lost_s

    @property
    def lost_s(self) -> float:
        """Return the time that no step is left of."""
        return self.lost_to_checkpoints_s + self.downtime_s

    @property
    def lost_to_checkpoints_s(self) -> float:
        """Return the time lost to saves, to restores and to what no save held."""
        return self.rework_s + self.stall_s + self.restore_s

    @property
    def ettr(self) -> float:
        """Return the share of the time whose training is left (effective training time ratio)."""
        return self.training_s / self.wall_s


def simulate(
    cluster: Cluster,
    system: SaveSystem,
    faults: FaultModel,
    *,
    steps: int | None = None,
    wall_s: float = math.inf,
    seed: int = 0,
) -> SimulatedJob:
    """Run one job until so many steps are done, or so much time is over.

    The same seed gives the same faults to every system.
    """
    job = _Job(cluster, system, steps)
    return job.run(faults, wall_s, seed)


def mean_outcome(outcomes: Sequence[SimulatedJob]) -> SimulatedJob:
    """Return the mean of each time, and the sums of faults and restores."""
    number = len(outcomes)
    return SimulatedJob(
        steps=round(sum(each.steps for each in outcomes) / number),
        training_s=sum(each.training_s for each in outcomes) / number,
        rework_s=sum(each.rework_s for each in outcomes) / number,
        stall_s=sum(each.stall_s for each in outcomes) / number,
        restore_s=sum(each.restore_s for each in outcomes) / number,
        downtime_s=sum(each.downtime_s for each in outcomes) / number,
        faults=dict(sum((Counter(each.faults) for each in outcomes), Counter[str]())),
        restores=dict(sum((Counter(each.restores) for each in outcomes), Counter[str]())),
    )


TRAINING, STALL, RESTORE, DOWNTIME = "training", "stall", "restore", "downtime"


def _cause_of(struck: simpy.Interrupt) -> tuple[Fault, set[int]]:
    return cast("tuple[Fault, set[int]]", struck.cause)


class _Copies:
    """Snapshots of one level: the newest that can be restored, and the one being copied."""

    def __init__(self, level: SavedLevel) -> None:
        self.level = level
        self.step = 0
        self.pending: tuple[int, float] | None = None  # its step, and when it will be there
        self.transfer: Transfer | None = None  # on the store's link; then the time is not known

    def settle(self, now_s: float) -> None:
        """Take note that a copy has arrived."""
        if self.pending is not None and self.pending[1] <= now_s:
            self.step, self.pending = self.pending[0], None

    def drop(self, step: int) -> None:
        """Forget the copy under way, and what is newer than the step restored."""
        self.step, self.pending = min(self.step, step), None


class _Job:
    """One job; see the module's header."""

    def __init__(self, cluster: Cluster, system: SaveSystem, steps: int | None) -> None:
        self._cluster = cluster
        self._target = math.inf if steps is None else steps
        self._env = simpy.Environment()
        self._store = SharedLink(self._env, cluster.store_bytes_per_s)
        self._copies = [_Copies(level) for level in system.levels]
        is_free = [not c.level.stall_s and c.level.place != SHARED for c in self._copies]
        self._free = [c for c, free in zip(self._copies, is_free, strict=True) if free]
        self._stalling = [c for c in self._copies if c not in self._free]
        self._spares = (
            None if cluster.spares is None else simpy.Container(self._env, init=cluster.spares)
        )
        self._step = 0
        self._lost_hosts: set[int] = set()
        self._missing = 0  # hosts to be replaced
        self._spent_s = dict.fromkeys((TRAINING, STALL, RESTORE, DOWNTIME), 0.0)
        self._phase = (TRAINING, 0.0)
        self._faults: Counter[str] = Counter()
        self._restores: Counter[str] = Counter()

    def run(self, faults: FaultModel, wall_s: float, seed: int) -> SimulatedJob:
        """Run to the end."""
        training = self._env.process(self._train())
        self._env.process(self._strike(faults, Random(seed), training))  # noqa: S311 - faults, no keys
        until = (
            training
            if math.isinf(wall_s)
            else self._env.any_of([training, self._env.timeout(wall_s)])
        )
        self._env.run(until)
        self._enter(TRAINING)
        training_s = self._step * self._cluster.step_s
        return SimulatedJob(
            steps=self._step,
            training_s=training_s,
            rework_s=self._spent_s[TRAINING] - training_s,
            stall_s=self._spent_s[STALL],
            restore_s=self._spent_s[RESTORE],
            downtime_s=self._spent_s[DOWNTIME],
            faults=dict(self._faults),
            restores=dict(self._restores),
        )

    def _enter(self, phase: str) -> None:
        """Count the time of the phase that ends."""
        before, since_s = self._phase
        self._spent_s[before] += self._env.now - since_s
        self._phase = (phase, self._env.now)

    # ---- training and saves

    def _train(self) -> Waiting:
        while self._step < self._target:
            try:
                yield from self._train_to_next_save()
            except simpy.Interrupt as struck:
                yield from self._restart(_cause_of(struck))

    def _train_to_next_save(self) -> Waiting:
        first, begun_s = self._step, self._env.now
        number = int(min(self._target, *(self._next(copies.level) for copies in self._stalling)))
        try:
            yield self._env.timeout((number - first) * self._cluster.step_s)
            self._step = number
        except simpy.Interrupt:
            self._step = first + self._steps_in(self._env.now - begun_s)
            raise
        finally:
            self._note_free_copies(first, begun_s)
        due = [c for c in self._stalling if number % c.level.every_steps == 0]
        if not due:
            return
        self._enter(STALL)
        try:
            for copies in due:
                while copies.level.waits and copies.transfer is not None:
                    yield copies.transfer.done
            yield self._env.timeout(self._stall_s(due))
            for copies in due:
                yield from self._copy(copies)
        finally:
            self._enter(TRAINING)

    def _next(self, level: SavedLevel) -> int:
        return (self._step // level.every_steps + 1) * level.every_steps

    def _steps_in(self, seconds: float) -> int:
        return math.floor(seconds / self._cluster.step_s + ROUNDING)

    def _note_free_copies(self, first: int, begun_s: float) -> None:
        """Note the newest copies of levels that training never waits for: they need no event."""
        for copies in self._free:
            level = copies.level
            captured = first + self._steps_in(self._env.now - begun_s - level.copy_s)
            copies.step = max(copies.step, captured // level.every_steps * level.every_steps)

    def _stall_s(self, due: list[_Copies]) -> float:
        """Return the stall of this save, without copies that training waits for."""
        synchronous_s = self._cluster.store_copy_s
        return max(
            copies.level.stall_s - copies.level.is_synchronous * synchronous_s for copies in due
        )

    def _copy(self, copies: _Copies) -> Waiting:
        """Begin to copy what was captured now; one copy of a level is under way at a time."""
        level = copies.level
        copies.settle(self._env.now)
        if copies.pending is not None:
            return
        if level.place != SHARED:
            copies.pending = (self._step, self._env.now + level.copy_s)
            copies.settle(self._env.now)
            return
        copies.pending = (self._step, math.inf)
        copies.transfer = transfer = self._begin_transfer()

        def arrived(_: Event) -> None:
            copies.transfer = None
            copies.pending = (copies.pending[0], self._env.now) if copies.pending else None
            copies.settle(self._env.now)

        assert transfer.done.callbacks is not None
        transfer.done.callbacks.append(arrived)
        if level.is_synchronous:
            yield transfer.done

    def _begin_transfer(self) -> Transfer:
        hosts_bytes_per_s = self._cluster.hosts * self._cluster.network_bytes_per_s
        return self._store.begin(self._cluster.state_bytes, hosts_bytes_per_s)

    # ---- faults and restarts

    def _strike(self, faults: FaultModel, random: Random, training: simpy.Process) -> Waiting:
        for fault in faults.draw(random):
            yield self._env.timeout(fault.at_s - self._env.now)
            self._faults[fault.kind] += 1
            if fault.kind == STORE:
                self._env.process(self._fail_store())
                continue
            if not training.is_alive:
                return
            training.interrupt((fault, self._hosts_of(fault, random)))

    def _fail_store(self) -> Waiting:
        self._store.fail()
        yield self._env.timeout(self._cluster.outage_s)
        self._store.recover()

    def _hosts_of(self, fault: Fault, random: Random) -> set[int]:
        """Return the hosts whose memory is gone."""
        cluster = self._cluster
        if fault.kind == RANK:
            return set()
        if fault.kind == CLUSTER:
            return set(range(cluster.hosts))
        host = random.randrange(cluster.hosts)
        if fault.kind != SWITCH:
            return {host}
        first = host // cluster.hosts_per_switch * cluster.hosts_per_switch
        return set(range(first, min(first + cluster.hosts_per_switch, cluster.hosts)))

    def _restart(self, cause: tuple[Fault, set[int]]) -> Waiting:
        """Go on from the newest snapshot that is left, however often it takes."""
        while True:
            self._enter(DOWNTIME)
            fault, hosts = cause
            self._abandon_copies()
            if fault.kind != CLUSTER:  # the whole cluster comes back as it was
                self._missing += len(hosts - self._lost_hosts)
                self._env.process(self._repair(len(hosts - self._lost_hosts)))
            self._lost_hosts |= hosts
            try:
                yield from self._replace_hosts(fault)
                yield from self._restore()
            except simpy.Interrupt as struck:
                cause = _cause_of(struck)
                continue
            self._lost_hosts.clear()
            self._enter(TRAINING)
            return

    def _abandon_copies(self) -> None:
        for copies in self._copies:
            copies.settle(self._env.now)
            copies.pending = None
            if copies.transfer is not None:
                self._store.abandon(copies.transfer)
                copies.transfer = None

    def _replace_hosts(self, fault: Fault) -> Waiting:
        while self._missing and self._spares is not None:
            request = self._spares.get(1)
            try:
                yield request
            except simpy.Interrupt:
                request.cancel()
                raise
            self._missing -= 1
        self._missing = 0
        waits_s = self._cluster.restart_s if fault.kind == RANK else self._cluster.replace_s
        yield self._env.timeout(waits_s)

    def _repair(self, hosts: int) -> Waiting:
        yield self._env.timeout(self._cluster.repair_s)
        if hosts and self._spares is not None:
            yield self._spares.put(hosts)

    def _restore(self) -> Waiting:
        """Read the newest snapshot that is left, from the nearest level that holds it."""
        self._enter(RESTORE)
        left = [copies for copies in self._copies if self._is_left(copies.level.place)]
        newest = max(left, key=lambda copies: copies.step, default=None)
        if newest is None or not newest.step:
            step, place = 0, START
        else:
            step, place = newest.step, newest.level.place
            yield self._env.timeout(newest.level.restore_s)
            if place == SHARED:
                transfer = self._begin_transfer()
                try:
                    yield transfer.done
                finally:
                    self._store.abandon(transfer)
        self._restores[place] += 1
        self._step = step
        for copies in self._copies:
            copies.drop(step)

    def _is_left(self, place: str) -> bool:
        if place == SHARED:
            return True
        if place == MEMORY:
            return not self._lost_hosts
        partner_of = self._cluster.partner_of
        return not any(partner_of(host) in self._lost_hosts for host in self._lost_hosts) and (
            self._cluster.hosts > 1 or not self._lost_hosts
        )
