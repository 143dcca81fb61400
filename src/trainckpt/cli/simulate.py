"""simulate: simulate a training job under faults, with checkpoints as several systems do."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.cli import output
from trainckpt.cli.cluster_arguments import (
    DAY_S,
    add_cluster_arguments,
    cluster_of,
    duration,
    faults_of,
    positive,
    whole,
)
from trainckpt.errors import ConfigurationError
from trainckpt.planning.loss_plots import draw_systems
from trainckpt.planning.presets import PRESETS, Preset
from trainckpt.planning.save_systems import MEMORY, NAMES, PARTNER, SHARED, build_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.planning.cluster import Cluster
    from trainckpt.planning.faults import FaultModel
    from trainckpt.planning.save_systems import SaveSystem
    from trainckpt.planning.simulation import SimulatedJob

COLUMNS = (
    "system",
    "saves",
    "wall time",
    "ETTR",
    "expected",
    "stalls",
    "rework",
    "restores",
    "downtime",
)
PLACES = (MEMORY, PARTNER, SHARED)
MOST_TIMES = 100.0  # the time of its steps, after which a job is given up
WHOLE_DAYS = 30.0  # simulated by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--preset", choices=tuple(PRESETS), help="a published cluster and job")
    parser.add_argument("--days", type=positive, metavar="D", help="of wall time; default 30")
    parser.add_argument("--steps", type=whole, metavar="N", help="of training, instead of days")
    parser.add_argument("--systems", metavar="NAMES", help=f"of {','.join(NAMES)}; default: all")
    parser.add_argument(
        "--every",
        action="append",
        default=[],
        metavar="LEVEL=TIME",
        help=f"interval of a level ({', '.join(PLACES)}) in every system; default: the best",
    )
    parser.add_argument("--repeat", type=output.count, default=5, metavar="N", help="default 5")
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="of the first")
    parser.add_argument("--gpu-hour", type=positive, metavar="PRICE", help="of one GPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="what is lost, as a picture")
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Simulate each system, and print what it loses."""
    preset = PRESETS[arguments.preset] if arguments.preset else None
    cluster = cluster_of(arguments, preset.cluster if preset else None)
    faults = faults_of(arguments, cluster, preset.faults if preset else None)
    systems = _systems(arguments, cluster, faults, preset)
    outcomes = _simulate(arguments, cluster, faults, systems, preset)
    if arguments.plot:
        draw_systems(arguments.plot, {s.name: _lost(o) for s, o in outcomes})
    assumed = preset.assumed if preset else ()
    if arguments.json:
        output.document(
            {
                "gpus": cluster.gpus,
                "hosts": cluster.hosts,
                "mtbf_s": faults.mtbf_s,
                "repeat": arguments.repeat,
                "seed": arguments.seed,
                "assumed": list(assumed),
                "systems": [
                    _to_json(system, outcome, cluster, faults) for system, outcome in outcomes
                ],
            }
        )
        return 0
    for system, outcome in outcomes:
        if arguments.steps and outcome.steps < arguments.steps:
            mean = "" if arguments.repeat == 1 else "on average "
            output.tell(f"{system.name}: only {outcome.steps:,} steps were done {mean}in the end")
    struck = sum(outcomes[0][1].faults.values()) / arguments.repeat
    output.table(
        (*COLUMNS, "lost GPU hours", "price") if arguments.gpu_hour else COLUMNS,
        [
            (*_row(system, outcome, cluster, faults), *_price(outcome, cluster, arguments.gpu_hour))
            for system, outcome in outcomes
        ],
        title=f"{cluster.gpus:,} GPUs on {cluster.hosts:,} hosts, {struck:,.1f} faults",
    )
    for sentence in assumed:
        print(f"assumed: {sentence}")
    return 0


def _systems(
    arguments: argparse.Namespace, cluster: Cluster, faults: FaultModel, preset: Preset | None
) -> list[SaveSystem]:
    names = arguments.systems.split(",") if arguments.systems else list(NAMES)
    for name in names:
        if name not in NAMES:
            raise ConfigurationError(f"no system {name!r} is known", hint=f"of {', '.join(NAMES)}")
    chosen = dict(_interval(word) for word in arguments.every)
    published = preset.every_s if preset else {}
    return [
        build_system(name, cluster, faults, {**published.get(name, {}), **chosen}) for name in names
    ]


def _interval(word: str) -> tuple[str, float]:
    place, _, text = word.partition("=")
    try:
        interval_s = duration(text)
    except argparse.ArgumentTypeError:
        interval_s = 0.0
    if place not in PLACES or interval_s <= 0.0:
        raise ConfigurationError(
            f"--every {word} is no interval",
            hint=f"such as store=10min; levels: {', '.join(PLACES)}",
        )
    return place, interval_s


def _simulate(
    arguments: argparse.Namespace,
    cluster: Cluster,
    faults: FaultModel,
    systems: Sequence[SaveSystem],
    preset: Preset | None,
) -> list[tuple[SaveSystem, SimulatedJob]]:
    from trainckpt.planning.simulation import mean_outcome, simulate

    steps, days = arguments.steps, arguments.days
    if steps is None and days is None:
        steps, days = (preset.steps, preset.days) if preset else (None, WHOLE_DAYS)
    wall_s = math.inf if days is None else days * DAY_S
    if steps is not None:  # faults may come so often that a job never ends
        wall_s = min(wall_s, MOST_TIMES * steps * cluster.step_s)
    outcomes = []
    with output.progress() as bar:
        task = bar.add_task("simulating", total=len(systems) * arguments.repeat)
        for system in systems:
            each = []
            for number in range(arguments.repeat):
                seed = arguments.seed + number
                each.append(
                    simulate(cluster, system, faults, steps=steps, wall_s=wall_s, seed=seed)
                )
                bar.advance(task)
            outcomes.append((system, mean_outcome(each)))
    return outcomes


def _lost(outcome: SimulatedJob) -> dict[str, float]:
    """Return the % of the wall time lost, by cause."""
    return {
        "stalls": 100 * outcome.stall_s / outcome.wall_s,
        "rework": 100 * outcome.rework_s / outcome.wall_s,
        "restores": 100 * outcome.restore_s / outcome.wall_s,
        "downtime": 100 * outcome.downtime_s / outcome.wall_s,
    }


def _expected(system: SaveSystem, faults: FaultModel) -> float | None:
    """Return the ETTR of the closed forms, where they hold."""
    return system.expected.loss.ettr if faults.is_poisson else None


def _row(
    system: SaveSystem, outcome: SimulatedJob, cluster: Cluster, faults: FaultModel
) -> tuple[str, ...]:
    saves = ", ".join(
        f"{level.place}: {output.span(level.every_steps * cluster.step_s)}"
        for level in system.levels
    )
    lost = [f"{percent:.2f} %" for percent in _lost(outcome).values()]
    expected = _expected(system, faults)
    ettrs = (f"{100 * outcome.ettr:.2f} %", "" if expected is None else f"{100 * expected:.2f} %")
    return (system.name, saves, output.span(outcome.wall_s), *ettrs, *lost)


def _price(outcome: SimulatedJob, cluster: Cluster, gpu_hour: float | None) -> tuple[str, ...]:
    if gpu_hour is None:
        return ()
    lost_hours = outcome.lost_s / 3600.0 * cluster.gpus
    return (f"{lost_hours:,.0f}", f"{lost_hours * gpu_hour:,.0f}")


def _to_json(
    system: SaveSystem, outcome: SimulatedJob, cluster: Cluster, faults: FaultModel
) -> dict[str, Any]:
    levels = [
        {
            "level": level.place,
            "every_steps": level.every_steps,
            "every_s": level.every_steps * cluster.step_s,
            "stall_s": level.stall_s,
        }
        for level in system.levels
    ]
    return {
        "system": system.name,
        "levels": levels,
        "steps": outcome.steps,
        "wall_s": outcome.wall_s,
        "training_s": outcome.training_s,
        "rework_s": outcome.rework_s,
        "stall_s": outcome.stall_s,
        "restore_s": outcome.restore_s,
        "downtime_s": outcome.downtime_s,
        "ettr": outcome.ettr,
        "expected_ettr": _expected(system, faults),
        "lost_to_checkpoints": outcome.lost_to_checkpoints_s / outcome.wall_s,
        "faults": outcome.faults,
        "restores": outcome.restores,
    }
