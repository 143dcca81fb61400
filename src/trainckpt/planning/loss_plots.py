"""Draw what is lost: against the interval of saves, and by system. Needs matplotlib."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

COLOURS = {
    "stalls": "#1f77b4",
    "rework": "#d62728",
    "restores": "#ff7f0e",
    "downtime": "#b0b7bf",
}


@contextmanager
def _axes(file: Path, width: float, height: float) -> Iterator[Any]:
    """Yield one panel; write the picture at the end.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigurationError(
            "a plot needs the package matplotlib, which is not installed",
            hint="pip install 'trainckpt[planning]'",
        ) from error
    figure, axes = plt.subplots(figsize=(width, height))
    yield axes
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # also an unknown format
        raise ConfigurationError(
            f"the plot cannot be written to {file}: {error}", hint="name a file such as loss.png"
        ) from error
    finally:
        plt.close(figure)


def draw_intervals(
    file: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    chosen: Mapping[str, tuple[float, float]],
) -> None:
    """Draw the loss in % against the interval in seconds, a curve for each level.

    Args:
        file: Where to; its name's end is the format.
        curves: Level -> points.
        chosen: Level -> the point that is advised.
    """
    with _axes(file, 7, 4) as panel:
        for name, points in curves.items():
            (line,) = panel.plot(*zip(*points, strict=True), label=name)
            if name in chosen:
                panel.plot(*chosen[name], "o", color=line.get_color())
        panel.set_xscale("log")
        panel.set_xlabel("interval of saves in seconds (the dot: advised)")
        panel.set_ylabel("% of the wall time lost")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()


def draw_systems(file: Path, losses: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each system: % of the wall time that is lost, by cause.

    Args:
        file: Where to; its name's end is the format.
        losses: System -> cause, as in `COLOURS` -> %.
    """
    with _axes(file, 8, 1 + 0.5 * len(losses)) as panel:
        names = list(losses)
        begins = [0.0] * len(names)
        for cause, colour in COLOURS.items():
            widths = [losses[name][cause] for name in names]
            panel.barh(names, widths, left=begins, color=colour, label=cause)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        for row, total in enumerate(begins):
            panel.text(total, row, f" {total:.1f} %", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_xlabel("% of the wall time lost")
        panel.legend(fontsize=8)
