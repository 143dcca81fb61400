"""A PNG of panels with logarithmic axes, as growth.py and many_tensors.py draw them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def panels(file: Path, *shape: int, dpi: int, **options: Any) -> Iterator[Any]:
    """Yield the axes of so many lines and columns; write them to the file at the end.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*shape, squeeze=False, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(file, dpi=dpi)
    plt.close(figure)


def label_panel(panel: Any, title: str, axis: str) -> None:
    """Name a panel and its horizontal axis, and make both axes logarithmic."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(axis, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)
