"""Draw the pictures of a report as SVG, by matplotlib, for a page that works without a network.

Each picture is drawn twice, for wide and for narrow screens, since scaled text cannot be read. An
SVG as matplotlib writes it is fixed in its colors, and a strict Content-Security-Policy forbids its
`style` attributes. So `_clean` makes plain attributes of them, and variables of the page's style
sheet of the colors: light and dark follow the reader's system.

Marks that tell more carry it as a `title`, which every browser shows, and as `data-tip`, for the
page's script. Texts from the run are escaped by the XML writer, and are no TeX.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from trainckpt.attempt import goodput
from trainckpt.cli import output
from trainckpt.cli.report import how_it_ended, stage_time, stages_of
from trainckpt.cli.status import LABELS, counted
from trainckpt.errors import ConfigurationError
from trainckpt.format.names import SnapshotName
from trainckpt.format.save_history import thin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainckpt.attempt.goodput import AttemptAccount
    from trainckpt.format.save_history import SaveRow
    from trainckpt.inspect.run_report import AttemptReport, RunReport
    from trainckpt.planning.advice import Recommendation

WIDE, NARROW = 1080, 340  # pixels
MOST_ROWS, MOST_TIPS = 24, 400  # attempts with a row of their own, and with a tip
LEAST_S = 1e-5  # of a stage, on a logarithmic axis
MOST_MARKS = {WIDE: 120, NARROW: 40}  # saves in a picture
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INSTALL = "pip install 'trainckpt[report]'"

# name of a variable of the style sheet -> the color that stands for it while matplotlib draws
_NAMES = (
    *("ink", "faint", "grid", "surface", "good", "bad", "accent"),
    *("training", "preparation", "restore", "save", "evaluation", "wasted", "leaving", "gap"),
    *("other", "s0", "s1", "s2", "s3", "s4", "s5", "written", "referred"),
)
_COLORS = {name: f"#fe{number:02x}fe" for number, name in enumerate(_NAMES)}
_VARIABLES = {color: f"var(--{name})" for name, color in _COLORS.items()}
_BUCKETS = {
    goodput.TRAINING: "training",
    goodput.PREPARATION: "preparation",
    goodput.RESTORE: "restore",
    goodput.SAVE: "save",
    goodput.EVALUATION: "evaluation",
    goodput.WASTED: "wasted",
    goodput.LEAVING: "leaving",
    goodput.GAP: "gap",
    goodput.OTHER: "other",
}
NUM_SERIES = 6
_GOOD = ("finished", "stopped", "alive")


@dataclass(frozen=True)
class Picture:
    """One picture, drawn for wide and narrow screens.

    Attributes:
        name: Its id on the page.
        wide, narrow: SVG.
        legend: Label -> variable of its color.
    """

    name: str
    wide: str
    narrow: str
    legend: Mapping[str, str] = field(default_factory=dict)


class _Canvas:
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
            spine.set_color(_COLORS["grid"])
        axes.tick_params(colors=_COLORS["faint"], labelcolor=_COLORS["faint"], labelsize=12)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)

    def mark(self, tip: str, series: str = "") -> str:
        """Return the id of a mark that tells `tip`; a legend hides the marks of its series."""
        self.tips.append((tip, series))
        return f"mark-{len(self.tips) - 1}"

    def bar(
        self, at: tuple[float, float], size: tuple[float, float], color: str, *, gid: str
    ) -> None:
        """Draw a bar from its lower left corner on; the limits of the axes stay as they are."""
        from matplotlib.patches import Rectangle

        fill = _COLORS[color] if color else "none"
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
        self.axes.add_patch(PathPatch(path, gid=gid, facecolor=_COLORS[color], linewidth=0.0))

    def dots(self, xs: Sequence[float], ys: Sequence[float], color: str, **how: Any) -> None:
        """Draw a line or one dot; the limits of the axes stay as they are."""
        from matplotlib.lines import Line2D

        self.axes.add_line(Line2D(xs, ys, color=_COLORS[color], clip_on=False, **how))

    def grid(self, axis: str) -> None:
        """Draw lines of a grid."""
        self.axes.grid(axis=axis, color=_COLORS["grid"], linewidth=0.8)

    def time_axis(self) -> None:
        """Label the x axis with local times."""
        from dateutil.tz import tzlocal

        dates: Any = import_module("matplotlib.dates")
        zone = tzlocal()
        most = 4 if self.is_narrow else 8
        locator = dates.AutoDateLocator(tz=zone, minticks=2, maxticks=most)
        self.axes.xaxis.set_major_locator(locator)
        self.axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
        self.axes.xaxis.get_offset_text().set_color(_COLORS["faint"])
        self.axes.xaxis.get_offset_text().set_size(11)

    def svg(self) -> str:
        """Return the drawing."""
        written = io.StringIO()
        self.figure.savefig(written, format="svg")
        return _clean(written.getvalue(), f"{self.name}-{self.width}-", self.tips)


def draw(report: RunReport, rows: Sequence[SaveRow]) -> dict[str, Picture]:
    """Return the pictures of a report, by name; one without data is left out.

    Args:
        report: The report.
        rows: The saves of all its attempts.

    Raises:
        ConfigurationError: matplotlib is not installed.
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
        "text.color": _COLORS["ink"],
    }
    known = [each for each in report.attempts if each.account is not None]
    stages = stages_of(rows)
    wanted: dict[str, Callable[[int], _Canvas]] = {}
    if report.status.account.wall_s > 0:
        wanted["timeline"] = lambda width: _timeline(width, known)
        wanted["buckets"] = lambda width: _buckets(width, report)
    if rows:
        wanted["stages"] = lambda width: _stages(width, rows)
        wanted["sizes"] = lambda width: _sizes(width, rows)
    if (advice := report.advice) is not None:
        wanted["loss"] = lambda width: _loss(width, advice, report.every_s)
    with mpl.rc_context(settings), warnings.catch_warnings():
        # It warns of a few labels more than asked for, as between two minutes and three.
        warnings.filterwarnings("ignore", "AutoDateLocator was unable", UserWarning)
        drawn = {name: (paint(WIDE).svg(), paint(NARROW).svg()) for name, paint in wanted.items()}
    spent = {name for name, seconds in report.status.account.buckets.items() if seconds > 0}
    legends = {
        "timeline": {LABELS[name][0]: _BUCKETS[name] for name in _BUCKETS if name in spent},
        "stages": {stage: f"s{index % NUM_SERIES}" for index, stage in enumerate(stages)},
        "sizes": {"written by the save": "written", "older files it refers to": "referred"},
    }
    if all(row.reached_bytes == 0 for row in rows):
        legends["sizes"] = {}
    return {name: Picture(name, *both, legends.get(name, {})) for name, both in drawn.items()}


# ---- the pictures


def _timeline(width: int, attempts: Sequence[AttemptReport]) -> _Canvas:
    """Draw the attempts over time, each in a row of its own as long as they are few."""
    if len(attempts) > MOST_ROWS:
        return _timeline_in_one_row(width, attempts)
    labels = [f"{each.attempt} {each.how}" for each in attempts]
    left = 14.0 + 7.2 * max(map(len, labels))
    canvas = _Canvas("timeline", width, 54 + 28 * len(attempts), left=left)
    most = max(MOST_MARKS[width] // (2 * len(attempts)), 5)
    until: float | None = None
    for row, each in enumerate(attempts):
        assert each.account is not None
        if until is not None and each.account.began > until:
            gap_s = each.account.began - until
            tip = f"{output.duration(gap_s)} before attempt {each.attempt}"
            gid = canvas.mark(tip, LABELS[goodput.GAP][0])
            canvas.bar((_days(until), row - 0.07), (_days(gap_s), 0.14), "gap", gid=gid)
        until = each.account.ended
        head = f"attempt {each.attempt}, {how_it_ended(each)}"
        for bucket, at, seconds in _phases(each.account):
            name = LABELS[bucket][0]
            tip = f"{head}: {name} {output.duration(seconds)} from {output.when(at)}"
            gid = canvas.mark(tip, name)
            canvas.bar((_days(at), row - 0.31), (_days(seconds), 0.62), _BUCKETS[bucket], gid=gid)
        _save_dots(canvas, each, row, most)
        _end_mark(canvas, each, row - 0.42 if canvas.is_narrow else row)
    canvas.axes.set_ylim(len(attempts) - 0.4, -0.6)
    canvas.axes.set_yticks(range(len(labels)), labels)
    _over_time(canvas, attempts)
    return canvas


def _timeline_in_one_row(width: int, attempts: Sequence[AttemptReport]) -> _Canvas:
    """Draw many attempts: their phases together, and over them the attempts themselves."""
    canvas = _Canvas("timeline", width, 100, left=14.0)
    phases: dict[str, list[tuple[float, float]]] = {}
    for each in attempts:
        assert each.account is not None
        for bucket, at, seconds in _phases(each.account):
            phases.setdefault(bucket, []).append((_days(at), _days(seconds)))
    for bucket, spans in phases.items():
        gid = canvas.mark("", LABELS[bucket][0])
        canvas.bars(spans, _BUCKETS[bucket], gid=gid)
    if len(attempts) <= MOST_TIPS and not canvas.is_narrow:
        for each in attempts:
            assert each.account is not None
            at, lasted_s = each.account.began, each.account.ended - each.account.began
            tip = f"attempt {each.attempt}, {how_it_ended(each)}: {output.duration(lasted_s)}"
            gid = canvas.mark(f"{tip} from {output.when(at)}")
            canvas.bar((_days(at), -0.31), (_days(lasted_s), 0.62), "", gid=gid)
    canvas.axes.set_ylim(0.6, -0.6)
    canvas.axes.set_yticks([])
    _over_time(canvas, attempts)
    return canvas


def _over_time(canvas: _Canvas, attempts: Sequence[AttemptReport]) -> None:
    """Let the x axis reach from the first launch to the last end."""
    accounts = [each.account for each in attempts if each.account is not None]
    first, last = accounts[0].began, max(each.ended for each in accounts)
    margin = 0.02 * max(last - first, 1.0)
    canvas.axes.set_xlim(_days(first - margin), _days(last + margin))
    canvas.grid("x")
    canvas.time_axis()


def _phases(account: AttemptAccount) -> Iterator[tuple[str, float, float]]:
    """Yield bucket, beginning and seconds in the order of time; waits and evaluations, which lie
    within training, after it.
    """
    order = (
        *(goodput.PREPARATION, goodput.RESTORE, goodput.TRAINING, goodput.SAVE),
        *(goodput.EVALUATION, goodput.WASTED, goodput.LEAVING, goodput.OTHER),
    )
    at = account.began
    for bucket in order:
        if (seconds := account.buckets.get(bucket, 0.0)) > 0:
            yield bucket, at, seconds
            at += seconds


def _save_dots(canvas: _Canvas, attempt: AttemptReport, row: int, most: int) -> None:
    rows = list(attempt.saves.rows)
    thin(rows, most)
    for each in rows:
        count = "" if each.count == 1 else f", the last of {counted(each.count, 'save')}"
        canvas.dots(
            [_days(each.at)],
            [row + 0.2],
            "surface",
            marker="o",
            markersize=3 if canvas.is_narrow else 4,
            markeredgecolor=_COLORS["ink"],
            markeredgewidth=0.8,
            gid=canvas.mark(f"{each.snapshot} saved {output.when(each.at)}{count}", "saves"),
        )


def _end_mark(canvas: _Canvas, attempt: AttemptReport, height: float) -> None:
    account = attempt.account
    if account is None or attempt.how == "alive":
        return
    good = attempt.how in _GOOD
    canvas.dots(
        [_days(account.ended)],
        [height],
        "good" if good else "bad",
        marker=("s" if attempt.how == "stopped" else "o") if good else "X",
        markersize=6 if canvas.is_narrow else 9,
        markeredgecolor=_COLORS["surface"],
        gid=canvas.mark(
            f"attempt {attempt.attempt} {how_it_ended(attempt)}, {output.when(account.ended)}"
        ),
    )


def _buckets(width: int, report: RunReport) -> _Canvas:
    """Draw the seconds of each bucket, the longest first."""
    account = report.status.account
    spent = {name: seconds for name, seconds in account.buckets.items() if seconds > 0}
    names = sorted(spent, key=lambda name: -spent[name])
    labels = [LABELS[name][0] for name in names]
    left = 14.0 + 6.9 * max(map(len, labels))
    canvas = _Canvas("buckets", width, 30 * len(names) + 22, left=left)
    longest = 0
    for row, name in enumerate(names):
        share = 100 * spent[name] / account.wall_s
        text = f"{output.duration(spent[name])} · {share:.1f} %"
        longest = max(longest, len(text))
        gid = canvas.mark(f"{LABELS[name][0]}: {text} of the wall time")
        canvas.bar((0, row - 0.31), (spent[name], 0.62), _BUCKETS[name], gid=gid)
        canvas.axes.annotate(
            text,
            (spent[name], row),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=12,
        )
    canvas.axes.set_yticks(range(len(labels)), labels)
    canvas.axes.set_ylim(len(names) - 0.4, -0.6)
    room = width - left - 8
    canvas.axes.set_xlim(0, max(spent.values()) * room / (room - 7.4 * longest - 16))
    canvas.axes.set_xticks([])
    canvas.axes.spines["bottom"].set_visible(False)
    canvas.axes.set_position((left / width, 0.02, 1 - (left + 8) / width, 0.96))
    return canvas


def _stages(width: int, rows: Sequence[SaveRow]) -> _Canvas:
    """Draw how long each stage of a save took, over time."""
    canvas = _Canvas("stages", width, 330 if width == WIDE else 280, left=58)
    shown = list(rows)
    thin(shown, MOST_MARKS[width])
    stages = stages_of(shown)
    canvas.axes.set_yscale("log")
    for index, (stage, values) in enumerate(stages.items()):
        color = f"s{index % NUM_SERIES}"
        for part in _by_attempt(values):
            xs = [_days(row.at) for row, _ in part]
            ys = [max(seconds, LEAST_S) for _, seconds in part]
            canvas.dots(xs, ys, color, linewidth=1.5, gid=canvas.mark("", stage))
        for row, seconds in values:
            count = "" if row.count == 1 else f", the slowest of {counted(row.count, 'save')}"
            tip = f"{row.snapshot}, {output.when(row.at)}: {stage} {stage_time(seconds)}{count}"
            how = {"marker": "o", "markersize": 5, "gid": canvas.mark(tip, stage)}
            canvas.dots([_days(row.at)], [max(seconds, LEAST_S)], color, **how)
    known = [max(seconds, LEAST_S) for values in stages.values() for _, seconds in values]
    margin = 0.02 * max(shown[-1].at - shown[0].at, 1.0)
    canvas.axes.set_xlim(_days(shown[0].at - margin), _days(shown[-1].at + margin))
    canvas.axes.set_ylim(min(known) / 1.4, 1.4 * max(known))
    _duration_axis(canvas.axes.yaxis)
    canvas.grid("y")
    canvas.time_axis()
    return canvas


def _by_attempt(values: Iterable[tuple[SaveRow, float]]) -> list[list[tuple[SaveRow, float]]]:
    """Return the values of each attempt: no line leads from one to the next."""
    parts: dict[str, list[tuple[SaveRow, float]]] = {}
    for row, seconds in values:
        attempt = row.snapshot.partition("~")[2].partition(".")[0]
        parts.setdefault(attempt, []).append((row, seconds))
    return [part for part in parts.values() if len(part) > 1]


def _sizes(width: int, rows: Sequence[SaveRow]) -> _Canvas:
    """Draw the bytes of each save, and of the older files that it refers to."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    canvas = _Canvas("sizes", width, 240, left=64)
    shown = list(rows)
    thin(shown, MOST_MARKS[width])
    for index, row in enumerate(shown):
        count = "" if row.count == 1 else f", the largest of {counted(row.count, 'save')}"
        older = f", refers to {output.size(row.reached_bytes)}" if row.reached_bytes else ""
        tip = f"{row.snapshot}: {output.size(row.num_bytes)} written{older}{count}"
        parts = (
            ("written by the save", "written", 0, row.num_bytes),
            ("older files it refers to", "referred", row.num_bytes, row.reached_bytes),
        )
        for series, color, bottom, height in parts:
            if height:
                gid = canvas.mark(tip, series)
                canvas.bar((index - 0.4, bottom), (0.8, height), color, gid=gid)
    most = max(row.num_bytes + row.reached_bytes for row in shown)
    canvas.axes.set_ylim(0, 1.1 * max(most, 1))
    canvas.axes.yaxis.set_major_locator(MaxNLocator(4))
    canvas.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: output.size(int(value))))
    num_ticks = min(3 if canvas.is_narrow else 8, len(shown))
    last = len(shown) - 1
    ticks = sorted({round(last * number / max(num_ticks - 1, 1)) for number in range(num_ticks)})
    canvas.axes.set_xticks(ticks, [f"step {_step(shown[tick]):,}" for tick in ticks])
    if len(ticks) > 2:  # the outer labels stay within the picture
        canvas.axes.get_xticklabels()[-1].set_horizontalalignment("right")
    canvas.axes.set_xlim(-0.9, max(len(shown) - 0.1, 6))
    canvas.grid("y")
    return canvas


def _step(row: SaveRow) -> int:
    name = SnapshotName.parse(row.snapshot)
    return 0 if name is None else name.step


def _loss(width: int, advice: Recommendation, every_s: float | None) -> _Canvas:
    """Draw the expected loss against the interval of saves."""
    from matplotlib.ticker import FuncFormatter

    canvas = _Canvas("loss", width, 260, left=58)
    (name, interval_s), *_ = advice.plan.intervals.items()
    points = advice.curve(name, also_s=every_s)
    canvas.axes.plot(*zip(*points, strict=True), color=_COLORS["accent"], linewidth=2)
    lost = 100 * advice.lost_share
    places = [(interval_s, lost, "advised", "good")]
    if every_s is not None and advice.now is not None:
        places.append((every_s, 100 * advice.now, "now", "bad"))
    canvas.axes.set_xscale("log")
    most = max(share for _, share, *_ in places)
    shown = [share for _, share in points if share <= 4 * most] or [most]
    canvas.axes.set_ylim(-0.16 * max(shown), 1.12 * max(*shown, 1.1 * most))
    low, high = points[0][0], points[-1][0]
    # Over the bottom of the curve there is room, but not for two labels.
    is_close = len(places) > 1 and abs(math.log(places[1][0] / interval_s)) < 0.45 * math.log(
        high / low
    )
    canvas.axes.set_xlim(low, high)
    for at_s, share, label, color in places:
        tip = f"{label}: a save each {output.span(at_s)} loses {share:.2f} % of the wall time"
        edge = _COLORS["surface"]
        how = {"marker": "o", "markersize": 10, "markeredgecolor": edge, "gid": canvas.mark(tip)}
        canvas.dots([at_s], [share], color, **how)
        along = math.log(at_s / low) / math.log(high / low)
        canvas.axes.annotate(
            f"{label}: {output.span(at_s)}, {share:.2f} %",
            (at_s, share),
            xytext=(0, -24 if label == "advised" and is_close else 12),
            textcoords="offset points",
            ha="left" if along < 0.3 else "right" if along > 0.7 else "center",
            fontsize=12,
        )
    canvas.axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.3g} %" if value >= 0 else "")
    )
    _duration_axis(canvas.axes.xaxis)
    canvas.grid("y")
    return canvas


def _duration_axis(axis: Any) -> None:
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


def _days(when: float) -> float:
    """Return a moment as matplotlib counts it: in days of UTC."""
    return when / 86400.0


# ---- from matplotlib's SVG to the page's


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
                element.set("data-tip", tip)
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
