"""advise: advise on the options of a job's checkpoints, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.cli import output
from trainckpt.cli.cluster_arguments import (
    GIGA,
    add_cluster_arguments,
    cluster_of,
    faults_of,
    positive,
)
from trainckpt.errors import ConfigurationError
from trainckpt.planning.advice import for_cluster, for_run
from trainckpt.planning.loss_plots import draw_intervals
from trainckpt.planning.run_history import measure
from trainckpt.run_directory.run_tiers import open_everywhere

if TYPE_CHECKING:
    import argparse

    from trainckpt.planning.advice import Recommendation

COLUMNS = ("option", "value", "because")
LOSS_COLUMNS = ("level", "interval", "stall", "failures that need it", "restore")
DAY_HOURS = 24.0
WITH_RUN = ("verb", "run", "json", "gpus", "mtbf", "gpu_hour", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run that has measured its saves")
    parser.add_argument("--gpu-hour", type=positive, metavar="PRICE", help="of one GPU")
    parser.add_argument("--host-memory-gb", type=positive, metavar="GB", help="of one host")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="loss against interval")
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Print the advice, and what is lost if it is followed."""
    recommended = _recommend(arguments)
    if arguments.plot:
        _draw(recommended, arguments.plot)
    if arguments.json:
        output.document(to_json(recommended, arguments.gpu_hour))
        return 0
    rows = [(each.option, each.value, each.reason) for each in recommended.options]
    output.table(COLUMNS, rows)
    output.table(LOSS_COLUMNS, _level_rows(recommended))
    for sentence in _sentences(recommended, arguments.gpu_hour):
        print(sentence)
    return 0


def _recommend(arguments: argparse.Namespace) -> Recommendation:
    if arguments.run is not None:
        return _recommend_for_run(arguments)
    cluster = cluster_of(arguments)
    memory_gb = arguments.host_memory_gb
    return for_cluster(
        cluster,
        faults_of(arguments, cluster),
        host_memory_bytes=None if memory_gb is None else memory_gb * GIGA,
    )


def _recommend_for_run(arguments: argparse.Namespace) -> Recommendation:
    others = [name for name, value in vars(arguments).items() if name not in WITH_RUN and value]
    if others:
        raise ConfigurationError(
            f"a run measures its own job: {', '.join(sorted(others))} cannot be named with it",
            hint="leave out RUN, or all but --mtbf and --gpus",
        )
    everywhere = open_everywhere(arguments.run)
    newest = next((c.manifest for c in everywhere.candidates() if c.manifest is not None), None)
    measured = measure(everywhere.records, newest, mtbf_s=arguments.mtbf)
    found = for_run(measured)
    return replace(found, gpus=arguments.gpus) if arguments.gpus else found


def _draw(recommended: Recommendation, file: Path) -> None:
    """Draw a curve for the levels of each interval."""
    together: dict[float, list[str]] = {}
    for name, interval_s in recommended.plan.intervals.items():
        together.setdefault(interval_s, []).append(name)
    curves = {", ".join(names): recommended.curve(names[-1]) for names in together.values()}
    lost = 100.0 * recommended.lost_share
    chosen = {", ".join(names): (interval_s, lost) for interval_s, names in together.items()}
    draw_intervals(file, curves, chosen)


def _level_rows(recommended: Recommendation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for level in recommended.levels:
        interval_s = recommended.plan.intervals.get(level.name)
        rate = level.failures_per_s
        rows.append(
            (
                level.name,
                "" if interval_s is None else output.span(interval_s),
                output.span(level.stall_s),
                f"one in {output.span(1 / rate)}" if rate else "none expected",
                output.span(level.restore_s),
            )
        )
    return rows


def _sentences(recommended: Recommendation, gpu_hour: float | None) -> list[str]:
    loss = recommended.plan.loss
    lost = {
        "stalls": loss.stall,
        "rework": loss.rework,
        "restores": loss.restore,
        "restarts": loss.downtime,
    }
    parts = ", ".join(f"{name} {100 * loss.of_wall(part):.2f} %" for name, part in lost.items())
    sentences = [f"expected loss: {100 * recommended.lost_share:.2f} % of the wall time ({parts})"]
    hours = recommended.lost_share * recommended.gpus * DAY_HOURS
    price = "" if gpu_hour is None else f", {hours * gpu_hour:,.0f} at {gpu_hour:g} an hour"
    sentences.append(f"each day: {hours:,.1f} GPU hours of {recommended.gpus:,} GPUs{price}")
    if recommended.now is not None:
        sentences.append(f"at the interval in use: {100 * recommended.now:.2f} %")
    return sentences


def to_json(recommended: Recommendation, gpu_hour: float | None) -> dict[str, Any]:
    """Return the document of `trainckpt advise --json`."""
    loss, plan = recommended.plan.loss, recommended.plan
    hours = recommended.lost_share * recommended.gpus * DAY_HOURS
    levels = [
        {
            "level": level.name,
            "every_s": plan.intervals.get(level.name),
            "stall_s": level.stall_s,
            "failures_per_s": level.failures_per_s,
            "restore_s": level.restore_s,
            "latency_s": level.latency_s,
        }
        for level in recommended.levels
    ]
    return {
        "options": [
            {"option": each.option, "value": each.value, "reason": each.reason}
            for each in recommended.options
        ],
        "levels": levels,
        "downtime_s": recommended.downtime_s,
        "expected": {
            "lost": recommended.lost_share,
            "stalls": loss.of_wall(loss.stall),
            "rework": loss.of_wall(loss.rework),
            "restores": loss.of_wall(loss.restore),
            "restarts": loss.of_wall(loss.downtime),
            "ettr": loss.ettr,
        },
        "lost_now": recommended.now,
        "gpus": recommended.gpus,
        "lost_gpu_hours_a_day": hours,
        "lost_price_a_day": None if gpu_hour is None else hours * gpu_hour,
    }
