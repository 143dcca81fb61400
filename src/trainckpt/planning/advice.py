"""Advise on the options of a run, each with its reason, from what was measured or assumed.

Two ways lead here. Before the first run there are figures of a cluster (`for_cluster`). Afterwards
there is what a run has measured (`for_run`). Both end in levels for `closed_forms.plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.planning.closed_forms import IntervalPlan, Level, expected_loss, plan
from trainckpt.planning.save_systems import (
    MEMORY,
    PARTNER,
    SHARED,
    build_system,
    closed_form,
    mean_downtime_s,
)

if TYPE_CHECKING:
    from trainckpt.planning.cluster import Cluster
    from trainckpt.planning.faults import FaultModel
    from trainckpt.planning.run_history import MeasuredRun
    from trainckpt.planning.save_systems import SavedLevel

LOCAL = "local"  # the run directory, as the option `every` calls it
OWN_FILES, PARTNER_FILES = 2.0, 2.0  # shard files in memory: arenas, and partners' copies
PARITY, PARITY_SHARE = "rs:8+2", 0.5  # 2M/K files beside the arenas
MEMORY_SHARE = 0.4  # of the host's memory, for all of these
AGREE_S = 5.0  # for ranks to agree on a stop, and to leave
SAFETY = 2.0  # how much longer than planned a final save may take
UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
POINTS, OCTAVES = 81, 4.0  # of a curve, which reaches so far to both sides


@dataclass(frozen=True)
class Advice:
    """One option: what to type, and why."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """All advice for one run.

    Attributes:
        options: In the order to read them.
        levels: As they went into the closed forms.
        plan: Interval of each level, and the expected loss.
        downtime_s: Mean time until a restart restores.
        gpus: Or ranks: what a lost hour is multiplied by.
        now: Expected loss at the interval in use; None: it is not known.
    """

    options: tuple[Advice, ...]
    levels: tuple[Level, ...]
    plan: IntervalPlan
    downtime_s: float
    gpus: int
    now: float | None = None

    @property
    def lost_share(self) -> float:
        """Return the expected share of the wall time that is lost, with all downtime."""
        return 1.0 - self.plan.loss.ettr

    def curve(self, name: str, *, also_s: float | None = None) -> list[tuple[float, float]]:
        """Return interval in seconds and % of the wall time lost, around the best interval.

        The other levels keep their interval, or the nearest one that still nests.

        Args:
            name: Of the level.
            also_s: An interval that the curve shall reach.
        """
        best_s = self.plan.intervals[name]
        reach = OCTAVES
        if also_s:
            reach = max(reach, abs(math.log2(also_s / best_s)) + 0.5)
        points = []
        for number in range(POINTS):
            interval_s = best_s * 2.0 ** (reach * (2.0 * number / (POINTS - 1) - 1.0))
            points.append((interval_s, 100.0 * self._lost_at(name, interval_s)))
        return points

    def _lost_at(self, name: str, interval_s: float) -> float:
        used = [level for level in self.levels if level.name in self.plan.intervals]
        best_s = self.plan.intervals[name]
        intervals_s = []
        for number, level in enumerate(used):  # levels that are saved at once stay together
            own_s = self.plan.intervals[level.name]
            own_s = interval_s if own_s == best_s else own_s
            is_nearer = number < [each.name for each in used].index(name)
            intervals_s.append(min(own_s, interval_s) if is_nearer else max(own_s, interval_s))
        return 1.0 - expected_loss(used, intervals_s, downtime_s=self.downtime_s).ettr


# ---- before the first run


def for_cluster(
    cluster: Cluster, faults: FaultModel, *, host_memory_bytes: float | None = None
) -> Recommendation:
    """Advise on a job from the figures of its cluster."""
    system = build_system("trainckpt", cluster, faults)
    levels = closed_form(list(system.levels), cluster, faults)
    used = {level.place: level for level in system.levels}
    options = [
        *_intervals(used, cluster, faults),
        *_redundancy(cluster, host_memory_bytes),
        *_stop(cluster.step_s, cluster.capture_s, cluster.store_copy_s),
    ]
    return Recommendation(
        options=tuple(options),
        levels=tuple(levels),
        plan=IntervalPlan(
            {name: level.every_steps * cluster.step_s for name, level in used.items()},
            system.expected.loss,
        ),
        downtime_s=mean_downtime_s(cluster, faults),
        gpus=cluster.gpus,
    )


def _intervals(used: dict[str, SavedLevel], cluster: Cluster, faults: FaultModel) -> list[Advice]:
    """Advise on `every`, and on `memory_every` where it is shorter."""
    near, store = used.get(MEMORY) or used.get(PARTNER), used[SHARED]
    every = every_text(store.every_steps * cluster.step_s, cluster.step_s)
    youngs = (
        f"a save stalls training by {seconds_text(store.stall_s)}, and a failure comes each "
        f"{seconds_text(faults.mtbf_s)}: Young's interval"
    )
    if near is None or near.every_steps >= store.every_steps:
        return [Advice("every", every, youngs)]
    steps = "1 step" if near.every_steps == 1 else f"{near.every_steps} steps"
    reason = "for failures that memory does not survive: Young's interval for these"
    if store.every_steps * cluster.step_s < store.least_s + near.every_steps * cluster.step_s:
        reason = (
            f"a copy to the store takes {seconds_text(cluster.store_copy_s)}, and copies should be "
            "under way for at most half of the time"
        )
    return [Advice("memory_every", steps, youngs), Advice("every", every, reason)]


def _redundancy(cluster: Cluster, host_memory_bytes: float | None) -> list[Advice]:
    if cluster.hosts < 2:
        return [Advice("redundancy", "none", "there is one host, and none to hold its copies")]
    host_bytes = cluster.state_bytes / cluster.hosts
    with_partner = host_bytes * (OWN_FILES + PARTNER_FILES)
    with_parity = host_bytes * (OWN_FILES + PARITY_SHARE)
    options = []
    if host_memory_bytes is not None and with_partner > MEMORY_SHARE * host_memory_bytes:
        reason = (
            f"partners would need {bytes_text(with_partner)} of a host's memory, parity "
            f"{bytes_text(with_parity)}; any two hosts of ten may be lost"
        )
        options.append(Advice("redundancy", PARITY, reason))
    else:
        reason = (
            f"a lost host is restored from another's memory, of which it takes "
            f"{bytes_text(with_partner)} with the saves themselves; {PARITY} takes "
            f"{bytes_text(with_parity)}"
        )
        options.append(Advice("redundancy", PARTNER, reason))
    if cluster.switches > 1:
        reason = f"a failed switch takes {cluster.hosts_per_switch} hosts: copies lie under another"
        options.append(Advice("failure_domain", "the name of the switch", reason))
    return options


def _stop(step_s: float, capture_s: float, write_s: float) -> list[Advice]:
    needs_s = AGREE_S + step_s + SAFETY * (capture_s + write_s)
    rounded_s = math.ceil(needs_s / 30.0) * 30.0
    reason = (
        f"a micro-batch of at most {seconds_text(step_s)}, twice the save of "
        f"{seconds_text(capture_s + write_s)}, and {AGREE_S:.0f} s to agree and leave"
    )
    return [
        Advice("stop_at", "auto", "the micro-batch, unless the window's end is cheaper"),
        Advice("grace", every_text(rounded_s, math.inf), reason),
    ]


# ---- from a run's measurements


def for_run(run: MeasuredRun) -> Recommendation:
    """Advise on a run from its own attempts: the interval, the stop, what it loses now."""
    level = Level(
        name=LOCAL,
        stall_s=run.stall_s,
        failures_per_s=1.0 / run.mtbf_s,
        restore_s=run.restore_s,
    )
    chosen = plan([level], downtime_s=run.downtime_s, step_s=run.step_s)
    every_s = chosen.intervals[LOCAL]
    seen = "1 failure" if run.failures == 1 else f"{run.failures} failures"
    reason = (
        f"a save stalls training by {seconds_text(run.stall_s)} ({run.saves} saves), and a failure "
        f"comes each {seconds_text(run.mtbf_s)} ({seen} so far): Young's interval"
    )
    options = [Advice("every", every_text(every_s, run.step_s), reason)]
    options += [
        Advice("every", f"{name}: auto", "a copy beside training costs it nothing: the newest")
        for name in run.tiers
    ]
    now = None
    if run.every_s is not None:
        at_s = max(run.every_s, run.step_s)
        now = 1.0 - expected_loss([level], [at_s], downtime_s=run.downtime_s).ettr
    return Recommendation(
        options=(*options, *_stop(run.step_s, run.stall_s, 0.0)),
        levels=(replace(level),),
        plan=chosen,
        downtime_s=run.downtime_s,
        gpus=run.world,
        now=now,
    )


# ---- texts


def every_text(seconds: float, step_s: float) -> str:
    """Return an interval as the option `every` takes it: in steps, if it is short."""
    if seconds < 10.0 and step_s < math.inf:
        steps = max(1, round(seconds / step_s))
        return "1 step" if steps == 1 else f"{steps} steps"
    unit, unit_s = next(each for each in UNITS if seconds >= 2 * each[1])
    return f"{seconds / unit_s:.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration for a sentence."""
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    for unit, unit_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def bytes_text(num_bytes: float) -> str:
    """Return a size for a sentence."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
