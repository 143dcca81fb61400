"""The rows as a picture: one panel for each job and figure, the floors drawn in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.compare.rows import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OURS, OTHERS, FLOOR = "#1f77b4", "#b0b7bf", "#d62728"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    jobs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        jobs.setdefault((row["ranks"], row["bytes"], row["compute"]), []).append(row)
    figure, axes = plt.subplots(
        len(jobs), len(COLUMNS), figsize=(4 * len(COLUMNS), 2.6 * len(jobs)), squeeze=False
    )
    for line, ((ranks, num_bytes, compute), group) in zip(axes, jobs.items(), strict=True):
        for panel, (column, floor) in zip(line, COLUMNS, strict=True):
            _panel(panel, group, column, floor)
        line[0].set_ylabel(f"{ranks} ranks, {num_bytes / 1e9:.1f} GB\n{compute}")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _panel(panel: Any, group: Sequence[dict[str, Any]], column: str, floor: str) -> None:
    figure, beside = (name.removesuffix("_s") for name in (column, floor))
    panel.set_title(f"{figure}, seconds\n(dashed: {beside})", fontsize=9)
    panel.axvline(group[0][floor], color=FLOOR, linestyle="--", linewidth=1)
    panel.tick_params(labelsize=8)
    shown = [row for row in group if row[column] is not None]
    if not shown:
        panel.set_yticks([])
        return
    names = [row["system"] for row in shown]
    colours = [OURS if name == "trainckpt" else OTHERS for name in names]
    bars = panel.barh(names, [max(0.0, row[column]) for row in shown], color=colours)
    panel.bar_label(bars, [f"{row[column]:.2f}" for row in shown], padding=2, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.2)
