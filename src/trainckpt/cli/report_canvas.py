"""Draw one picture by matplotlib, as SVG to stand in a page that works without a network.

An SVG as matplotlib writes it is fixed in its colors, and a strict Content-Security-Policy forbids
its `style` attributes. So `_clean` makes plain attributes of them, and variables of the page's
style sheet of the colors: light and dark follow the reader's system.

Marks that tell more carry it as a `title`, which every browser shows, and the page's script too.
Texts are escaped by the XML writer, and are no TeX.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDE, NARROW = 1080, 340  # pixels
INSTALL = "pip install 'trainckpt[report]'"

# name of a variable of the style sheet -> the color that stands for it while matplotlib draws
_NAMES = (
    *("ink", "faint", "grid", "surface", "good", "bad", "accent"),
    *("training", "preparation", "restore", "save", "evaluation", "wasted", "leaving", "gap"),
    *("other", "s0", "s1", "s2", "s3", "s4", "s5", "written", "referred"),
)
COLORS = {name: f"#fe{number:02x}fe" for number, name in enumerate(_NAMES)}
_VARIABLES = {color: f"var(--{name})" for name, color in COLORS.items()}


@contextmanager
def drawing() -> Iterator[None]:
    """Let matplotlib draw as the page needs it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigurationError(
            "a page of HTML needs the package matplotlib, which is not installed", hint=INSTALL
        ) from error
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "trainckpt",
        "text.parse_math": False,
        "axes.unicode_minus": False,
        "font.size": 12,
        "text.color": COLORS["ink"],
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # It warns of a few labels more than asked for, as between two minutes and three, and of
        # letters that its own font lacks: the reader's browser draws the texts.
        warnings.filterwarnings("ignore", "AutoDateLocator was unable|Glyph", UserWarning)
        yield


class Canvas:
    """One drawing: its axes, and the marks that tell more."""

    def __init__(self, name: str, width: int, height: float, *, left: float = 8.0) -> None:
        from matplotlib.figure import Figure

        self.name, self.width, self.is_narrow = name, width, width == NARROW
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        right = 14.0
        self.axes: Any = self.figure.add_axes(
            (left / width, 34 / height, 1 - (left + right) / width, 1 - 44 / height)
        )
        self.tips: list[tuple[str, str]] = []
        axes = self.axes
        axes.patch.set_visible(False)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(COLORS["grid"])
        axes.tick_params(colors=COLORS["faint"], labelcolor=COLORS["faint"], labelsize=12)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)

    def mark(self, tip: str, series: str = "") -> str:
        """Return the id of a mark that tells `tip`; a legend hides the marks of its series."""
        self.tips.append((tip, series))
        return f"mark-{len(self.tips) - 1}"

    def bar(
        self, at: tuple[float, float], size: tuple[float, float], color: str, *, gid: str
    ) -> None:
        """Draw a bar from its lower left corner on; the limits of the axes stay as they are.

        Without a color it is not seen, and tells its tip.
        """
        from matplotlib.patches import Rectangle

        fill = COLORS[color] if color else "none"
        self.axes.add_patch(Rectangle(at, size[0], size[1], gid=gid, facecolor=fill, linewidth=0.0))

    def bars(self, spans: Sequence[tuple[float, float]], color: str, *, gid: str) -> None:
        """Draw bars of one color in one row, as one mark; spans are beginnings and lengths."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        low, high = -0.31, 0.31
        corners = [
            [(at, low), (at, high), (at + length, high), (at + length, low), (at, low)]
            for at, length in spans
        ]
        path = Path.make_compound_path(*(Path(each, closed=True) for each in corners))
        self.axes.add_patch(PathPatch(path, gid=gid, facecolor=COLORS[color], linewidth=0.0))

    def dots(self, xs: Sequence[float], ys: Sequence[float], color: str, **how: Any) -> None:
        """Draw a line or one dot; the limits of the axes stay as they are."""
        from matplotlib.lines import Line2D

        self.axes.add_line(Line2D(xs, ys, color=COLORS[color], clip_on=False, **how))

    def grid(self, axis: str) -> None:
        """Draw lines of a grid."""
        self.axes.grid(axis=axis, color=COLORS["grid"], linewidth=0.8)

    def time_axis(self) -> None:
        """Label the x axis with local times."""
        from dateutil.tz import tzlocal

        dates: Any = import_module("matplotlib.dates")
        zone = tzlocal()
        most = 4 if self.is_narrow else 8
        locator = dates.AutoDateLocator(tz=zone, minticks=2, maxticks=most)
        self.axes.xaxis.set_major_locator(locator)
        self.axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
        self.axes.xaxis.get_offset_text().set_color(COLORS["faint"])
        self.axes.xaxis.get_offset_text().set_size(11)

    def svg(self) -> str:
        """Return the drawing."""
        written = io.StringIO()
        self.figure.savefig(written, format="svg")
        return _clean(written.getvalue(), f"{self.name}-{self.width}-", self.tips)


def duration_axis(axis: Any) -> None:
    """Label a logarithmic axis with durations that people use."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    marks = [0.0001, 0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000]
    low, high = axis.get_view_interval()
    if high / max(low, 1e-9) < 300:
        marks = sorted({*marks, *(3 * mark for mark in marks[:6]), 30, 180, 1800, 10800})
    axis.set_major_locator(FixedLocator(marks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(seconds: float) -> str:
    """Return a round duration: `10 ms`, `1 s`, `10 min`."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


def days(when: float) -> float:
    """Return a moment as matplotlib counts it: in days of UTC."""
    return when / 86400.0


# ---- from matplotlib's SVG to the page's


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_DROPPED = (f"{{{SVG}}}metadata", f"{{{SVG}}}style")
_KEPT_STYLES = (
    *("fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "text-anchor"),
    *("font-size", "fill-opacity", "stroke-opacity", "stroke-linejoin"),
)
_FONT = re.compile(r"([\d.]+)px")
_REFERENCE = re.compile(r"#([\w-]+)")


def _clean(svg: str, prefix: str, tips: Sequence[tuple[str, str]]) -> str:
    """Return an SVG to stand in a page: no styles of its own, ids of its own, marks with texts."""
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(svg)  # noqa: S314 - matplotlib has just written it
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in _DROPPED:
                parent.remove(child)
    for element in root.iter():
        _set_styles(element)
        identity = element.attrib.pop("id", "")
        if identity.startswith("mark-"):
            tip, series = tips[int(identity.removeprefix("mark-"))]
            if tip:
                element.set("class", "mark")
                title = ET.Element(f"{{{SVG}}}title")
                title.text = tip
                element.insert(0, title)
            if series:
                element.set("data-series", series)
        elif identity:
            element.set("id", prefix + identity)
        for name, value in element.attrib.items():
            if value.startswith(("#", "url(#")) and not name.startswith(("fill", "stroke")):
                element.set(name, _REFERENCE.sub(rf"#{prefix}\1", value))
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("focusable", "false")
    return ET.tostring(root, encoding="unicode")


def _set_styles(element: ET.Element) -> None:
    """Make attributes of an element's styles, and variables of its colors."""
    styles = {
        name.strip(): value.strip()
        for name, _, value in (
            each.partition(":") for each in element.attrib.pop("style", "").split(";")
        )
        if value
    }
    if match := _FONT.search(styles.pop("font", "")):
        styles["font-size"] = f"{match[1]}px"
    for name, value in styles.items():
        if name in _KEPT_STYLES:
            element.set(name, _VARIABLES.get(value, value))
