"""From samples to rows and the table; standard library only.

Each row has medians. `stall_s` is the median over all pairs of windows of their difference, and
`slowdown` of their ratio. `slowdown_upper95` is the upper 95 % bound of that median by order
statistics: the smallest ratio of the sample below which the true median lies with at least 95 %
confidence, whatever the distribution. Five pairs are the fewest that have one.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOORS = (
    "floor_copy_s",
    "floor_write_s",
    "floor_read_s",
    "floor_fresh_copy_s",
    "floor_copy_share_s",
)
COLUMNS = (
    ("stall_s", "floor_copy_s"),
    ("durable_s", "floor_write_s"),
    ("restore_cold_s", "floor_read_s"),
    ("restore_memory_s", "floor_fresh_copy_s"),
)


def row(
    system: str, samples: dict[str, list[float]], floors: dict[str, float], job: dict[str, Any]
) -> dict[str, Any]:
    """One system in one job; None for what was not measured."""
    pairs = list(zip(samples["plain"], samples["saved"], strict=True))
    ratios = [s / p for p, s in zip(samples["plain"], samples["settled"], strict=True)]
    return {
        "system": system,
        "ranks": job["ranks"],
        "bytes": job["bytes"],
        "compute": job["compute"],
        "stall_s": median([saved - plain for plain, saved in pairs]),
        "durable_s": median(samples["durable"]),
        "restore_cold_s": median(samples["restore_cold"]),
        "restore_memory_s": median(samples["restore_memory"]),
        **floors,
        "slowdown": median(ratios),
        "slowdown_upper95": upper95(ratios),
        "durable_training_s": median(samples["durable_training"]),
        "gpu_save_bytes": more(samples["gpu_saved"], samples["gpu_plain"]),
        "host_save_bytes": max(samples["host"], default=None),
        "step_s": median([plain / job["window"] for plain in samples["plain"]]),
        "pairs": len(pairs),
        **{key: job[key] for key in ("rounds", "window", "threads", "device", "machine")},
        "command": job["command"],
        "left_out": job["left_out"],
    }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Of each floor, over the rounds."""
    return {name: median([floors[name] for floors in rounds]) for name in FLOORS}


def median(values: Sequence[float]) -> float | None:
    """To a tenth of a millisecond; None of nothing."""
    return round(statistics.median(values), 4) if values else None


def more(with_save: Sequence[int], without: Sequence[int]) -> int | None:
    """By how much the largest is larger; None where nothing was counted, as on a CPU."""
    return max(with_save) - max(without) if any(without) and with_save else None


def upper95(values: Sequence[float]) -> float | None:
    """The upper 95 % bound of the median of what `values` were drawn from.

    Each value falls below that median as a coin shows heads. The k-th smallest of n is above it if
    fewer than k do: so the smallest k for which n tosses show fewer than k heads with a probability
    of 95 % or more. Of 21 it is the 15th.
    """
    n, below = len(values), 0.0
    for k in range(1, n + 1):
        below += math.comb(n, k - 1) / 2**n
        if below >= 0.95:
            return round(sorted(values)[k - 1], 4)
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows in words: seconds, and in brackets how many times the floor."""
    head = f"{'system':<20}" + "".join(f"{c.removesuffix('_s'):>20}" for c, _ in COLUMNS)
    lines, last = [], None
    for one in rows:
        job = (one["ranks"], one["bytes"], one["compute"])
        if job != last:
            lines += ["", _title(one), head + f"{'slowdown (upper 95 %)':>24}"]
            floor = "".join(f"{_seconds(one[f]):>20}" for _, f in COLUMNS)
            lines.append(f"{'(floor)':<20}{floor}")
            last = job
        cells = "".join(f"{_cell(one[c], one[f]):>20}" for c, f in COLUMNS)
        slowdown = f"{_seconds(one['slowdown'])} ({_seconds(one['slowdown_upper95'])})"
        lines.append(f"{one['system']:<20}{cells}{slowdown:>24}")
    return "\n".join(lines[1:])


def _title(one: dict[str, Any]) -> str:
    ranks = f"{one['ranks']} rank{'s' * (one['ranks'] > 1)}"
    return f"{ranks}, {one['bytes'] / 1e9:.2f} GB, {one['compute']}, step {one['step_s']} s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(value: float | None, floor: float) -> str:
    return "-" if value is None else f"{value:.3f} ({value / floor:.2f}x)"
