"""Describe how systems save: the levels of each, with stalls, copies and restores on a cluster.

    synchronous      training waits until the store has the state
    async            training waits for a copy in memory; one store behind it (DCP, ByteCheckpoint)
    peer-memory      a copy in another host's memory at every step, the store every 3 hours (GEMINI)
    gradients        further hosts get each step's gradients and take the step too (Checkmate); the
                     store as above. The price of those hosts is not counted
    trainckpt        memory, a partner's memory, the store

What peers publish of their stalls is taken as it stands, even where it is none: docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.planning.closed_forms import IntervalPlan, Level, plan
from trainckpt.planning.faults import CLUSTER, HOST, RANK, STORE, SWITCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.planning.cluster import Cluster
    from trainckpt.planning.faults import FaultModel


# Where a snapshot lies: in the memory of its own host; in that of a partner; in the store.
MEMORY, PARTNER, SHARED = "memory", "partner", "store"
ASYNC_STALL_S = 0.59  # ByteCheckpoint (NSDI 2025): a model of 405B parameters on 8,960 GPUs
PEER_STORE_S = 3 * 3600.0  # GEMINI (SOSP 2023): copies to the store beside those of each step
COPYING_SHARE = 0.5  # of the time, at most, that trainckpt copies to a store
UNNEEDED_S = 3600.0  # interval of a level that no expected fault needs
NAMES = ("trainckpt", "synchronous", "async", "peer-memory", "gradients")


@dataclass(frozen=True, kw_only=True)
class SavedLevel:
    """One level of a system.

    Attributes:
        place: `MEMORY`, `PARTNER` or `SHARED`.
        stall_s: Of a save that reaches this level, and with it the nearer ones.
        copy_s: From the capture until it can be restored; on the store only if nothing disturbs.
        restore_s: Before and beside the bytes that come from the store.
        every_s: Interval as chosen by the system; None: the best.
        least_s: Shortest interval.
        is_synchronous: Training waits for the copy as well.
        waits: A save that is due during the copy of the one before waits for it; else it is left
            out.
        every_steps: The interval in steps, once it has been chosen.
    """

    place: str
    stall_s: float
    copy_s: float
    restore_s: float
    every_s: float | None = None
    least_s: float = 0.0
    is_synchronous: bool = False
    waits: bool = False
    every_steps: int = 0


@dataclass(frozen=True)
class SaveSystem:
    """A system on a cluster.

    Attributes:
        name: Its.
        levels: Nearest first.
        expected: What the closed forms say of it.
    """

    name: str
    levels: tuple[SavedLevel, ...]
    expected: IntervalPlan


def build_system(
    name: str,
    cluster: Cluster,
    faults: FaultModel,
    every_s: Mapping[str, float] | None = None,
) -> SaveSystem:
    """Return a system with the interval of each level in steps.

    Args:
        name: One of `NAMES`.
        cluster: Where it runs.
        faults: What it is planned for.
        every_s: Place -> interval, where it is fixed.
    """
    levels = [
        replace(level, every_s=(every_s or {}).get(level.place, level.every_s))
        for level in _BUILDERS[name](cluster)
    ]
    expected = plan(
        closed_form(levels, cluster, faults),
        downtime_s=mean_downtime_s(cluster, faults),
        step_s=cluster.step_s,
    )
    used = [level for level in levels if level.place in expected.intervals]
    return SaveSystem(name, tuple(_in_steps(used, expected, cluster.step_s)), expected)


def _in_steps(levels: list[SavedLevel], expected: IntervalPlan, step_s: float) -> list[SavedLevel]:
    """Return the levels with intervals in steps, each a multiple of the nearer one's."""
    found: list[SavedLevel] = []
    nearer = 1
    for level in levels:
        interval_s = expected.intervals[level.place]
        interval_s = UNNEEDED_S if math.isinf(interval_s) else interval_s
        windows = max(interval_s - level.stall_s, 0.0) / step_s / nearer
        least = max(level.least_s - level.stall_s, 0.0) / step_s / nearer
        steps = max(1, round(windows), math.ceil(least)) * nearer
        found.append(replace(level, every_steps=steps))
        nearer = steps
    return found


# ---- the systems


def _synchronous(cluster: Cluster) -> list[SavedLevel]:
    stall_s = cluster.capture_s + cluster.store_copy_s
    return [
        SavedLevel(
            place=SHARED,
            stall_s=stall_s,
            copy_s=0.0,
            restore_s=cluster.overhead_s,
            is_synchronous=True,
        )
    ]


def _async(cluster: Cluster) -> list[SavedLevel]:
    return [
        SavedLevel(
            place=SHARED,
            stall_s=max(ASYNC_STALL_S, cluster.capture_s),
            copy_s=cluster.store_copy_s,
            restore_s=cluster.overhead_s,
            least_s=cluster.store_copy_s,
            waits=True,
        )
    ]


def _peer_memory(cluster: Cluster) -> list[SavedLevel]:
    memory = SavedLevel(
        place=MEMORY,
        stall_s=0.0,
        copy_s=0.0,
        restore_s=cluster.capture_s,
        every_s=cluster.step_s,
    )
    return [
        memory,
        replace(memory, place=PARTNER, copy_s=cluster.peer_copy_s),
        SavedLevel(
            place=SHARED,
            stall_s=0.0,
            copy_s=cluster.store_copy_s,
            restore_s=cluster.overhead_s,
            every_s=PEER_STORE_S,
        ),
    ]


def _gradients(cluster: Cluster) -> list[SavedLevel]:
    _, partner, store = _peer_memory(cluster)
    return [replace(partner, copy_s=cluster.step_s), store]


def _trainckpt(cluster: Cluster) -> list[SavedLevel]:
    memory = SavedLevel(
        place=MEMORY, stall_s=cluster.capture_s, copy_s=0.0, restore_s=cluster.capture_s
    )
    copy_s, store_copy_s = cluster.peer_copy_s, cluster.store_copy_s
    partner = replace(
        memory,
        place=PARTNER,
        copy_s=copy_s,
        restore_s=cluster.capture_s + copy_s,
        least_s=copy_s,
    )
    return [
        *([memory] if cluster.hosts < 2 else [memory, partner]),
        SavedLevel(
            place=SHARED,
            stall_s=cluster.capture_s,
            copy_s=store_copy_s,
            restore_s=cluster.overhead_s,
            least_s=store_copy_s / COPYING_SHARE,
        ),
    ]


_BUILDERS: dict[str, Callable[[Cluster], list[SavedLevel]]] = {
    "trainckpt": _trainckpt,
    "synchronous": _synchronous,
    "async": _async,
    "peer-memory": _peer_memory,
    "gradients": _gradients,
}


# ---- the same in the closed forms


def closed_form(levels: list[SavedLevel], cluster: Cluster, faults: FaultModel) -> list[Level]:
    """Return the levels as `plan` takes them: failures at the nearest level that survives them.

    Not counted: two failures at once, a store that does not answer, spares that run out.
    """
    places = [level.place for level in levels]
    rates = dict.fromkeys(places, 0.0)
    for kind in (RANK, HOST, SWITCH, CLUSTER):
        rates[next(p for p in places if survives(p, kind, cluster))] += faults.rate(kind)
    found = []
    for level in levels:
        from_store_s = cluster.store_copy_s if level.place == SHARED else 0.0
        found.append(
            Level(
                name=level.place,
                stall_s=level.stall_s,
                failures_per_s=rates[level.place],
                restore_s=level.restore_s + from_store_s,
                latency_s=level.copy_s,
                least_s=level.least_s,
                at_s=level.every_s,
            )
        )
    return found


def survives(place: str, kind: str, cluster: Cluster) -> bool:
    """Return True if snapshots in this place survive one fault of this kind."""
    if place == SHARED:
        return True
    if place == MEMORY:
        return kind == RANK
    if cluster.hosts < 2 or kind == CLUSTER:
        return kind == RANK
    return kind != SWITCH or cluster.switches > 1


def mean_downtime_s(cluster: Cluster, faults: FaultModel) -> float:
    """Return the mean time from a fault until the processes restore, with spares at hand."""
    rates = {kind: faults.rate(kind) for kind in faults.means_s if kind != STORE}
    whole = sum(rates.values())
    if not whole:
        return 0.0
    lasts_s = {RANK: cluster.restart_s}
    return sum(r * lasts_s.get(k, cluster.replace_s) for k, r in rates.items()) / whole
