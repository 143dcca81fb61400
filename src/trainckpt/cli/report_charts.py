"""Draw the pictures of a report: attempts, times, stages and sizes of saves, expected loss.

Each picture is drawn twice, for wide and for narrow screens, since scaled text cannot be read. Of
long runs neighbours share a mark, and texts of the run are cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainckpt.attempt import goodput
from trainckpt.cli import output
from trainckpt.cli.report import brief, how_it_ended, stage_time, stages_of
from trainckpt.cli.report_canvas import COLORS, NARROW, WIDE, Canvas, days, drawing, duration_axis
from trainckpt.cli.status import LABELS, counted
from trainckpt.format.names import SnapshotName
from trainckpt.format.save_history import thin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainckpt.attempt.goodput import AttemptAccount
    from trainckpt.format.save_history import SaveRow
    from trainckpt.inspect.run_report import AttemptReport, RunReport
    from trainckpt.planning.advice import Recommendation

MOST_ROWS = 24  # attempts with a row of their own
MOST_BARS = {WIDE: 360, NARROW: 110}  # beyond that, neighbours in the one row share a bar
LONGEST_LABEL, LONGEST_TIP = 24, 100  # characters of an attempt's end
LEAST_S = 1e-5  # of a stage, on a logarithmic axis
MOST_MARKS = {WIDE: 120, NARROW: 40}  # saves in a picture

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


def draw(report: RunReport, rows: Sequence[SaveRow]) -> dict[str, Picture]:
    """Return the pictures of a report, by name; one without data is left out.

    Args:
        report: The report.
        rows: The saves of all its attempts.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    known = _known(report)
    stages = stages_of(rows)
    wanted: dict[str, Callable[[int], Canvas]] = {}
    if report.status.account.wall_s > 0:
        wanted["timeline"] = lambda width: _timeline(width, known)
        wanted["buckets"] = lambda width: _buckets(width, report)
    if rows:
        wanted["stages"] = lambda width: _stages(width, rows)
        wanted["sizes"] = lambda width: _sizes(width, rows)
    if (advice := report.advice) is not None:
        wanted["loss"] = lambda width: _loss(width, advice, report.every_s)
    with drawing():
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


def _timeline(width: int, attempts: Sequence[AttemptReport]) -> Canvas:
    """Draw the attempts over time, each in a row of its own as long as they are few."""
    if len(attempts) > MOST_ROWS:
        return _timeline_in_one_row(width, attempts)
    labels = [brief(f"{each.attempt} {each.how}", LONGEST_LABEL) for each in attempts]
    left = 14.0 + 7.2 * max(map(len, labels))
    canvas = Canvas("timeline", width, 54 + 28 * len(attempts), left=left)
    most = max(MOST_MARKS[width] // (2 * len(attempts)), 5)
    until: float | None = None
    for row, each in enumerate(attempts):
        assert each.account is not None
        if until is not None and each.account.began > until:
            gap_s = each.account.began - until
            tip = f"{output.duration(gap_s)} before attempt {each.attempt}"
            gid = canvas.mark(tip, LABELS[goodput.GAP][0])
            canvas.bar((days(until), row - 0.07), (days(gap_s), 0.14), "gap", gid=gid)
        until = each.account.ended
        head = f"attempt {each.attempt}, {_end(each)}"
        for bucket, at, seconds in _phases(each.account):
            name = LABELS[bucket][0]
            tip = f"{head}: {name} {output.duration(seconds)} from {output.when(at)}"
            gid = canvas.mark(tip, name)
            canvas.bar((days(at), row - 0.31), (days(seconds), 0.62), _BUCKETS[bucket], gid=gid)
        _save_dots(canvas, each, row, most)
        _end_mark(canvas, each, row - 0.42 if canvas.is_narrow else row)
    canvas.axes.set_ylim(len(attempts) - 0.4, -0.6)
    canvas.axes.set_yticks(range(len(labels)), labels)
    _over_time(canvas, attempts)
    return canvas


def _timeline_in_one_row(width: int, attempts: Sequence[AttemptReport]) -> Canvas:
    """Draw many attempts: their phases together, and over them the bars that tell of them."""
    canvas = Canvas("timeline", width, 100, left=14.0)
    num = _attempts_a_bar(len(attempts), width)
    groups = [attempts[first : first + num] for first in range(0, len(attempts), num)]
    accounts = [_joined([each.account for each in group if each.account]) for group in groups]
    phases: dict[str, list[tuple[float, float]]] = {}
    for account in accounts:
        for bucket, at, seconds in _phases(account):
            phases.setdefault(bucket, []).append((days(at), days(seconds)))
    for bucket, spans in phases.items():
        gid = canvas.mark("", LABELS[bucket][0])
        canvas.bars(spans, _BUCKETS[bucket], gid=gid)
    for group, account in zip(groups, accounts, strict=True):
        at, lasted_s = account.began, account.ended - account.began
        head = f"attempts {group[0].attempt} to {group[-1].attempt}"
        if len(group) == 1:
            head = f"attempt {group[0].attempt}, {_end(group[0])}"
        gid = canvas.mark(f"{head}: {output.duration(lasted_s)} from {output.when(at)}")
        canvas.bar((days(at), -0.31), (days(lasted_s), 0.62), "", gid=gid)
    canvas.axes.set_ylim(0.6, -0.6)
    canvas.axes.set_yticks([])
    _over_time(canvas, attempts)
    return canvas


def _attempts_a_bar(num: int, width: int) -> int:
    return math.ceil(num / MOST_BARS[width])


def _joined(accounts: Sequence[AttemptAccount]) -> AttemptAccount:
    """Return the account of neighbours, as if they were one attempt."""
    buckets = goodput.RunAccount(tuple(accounts)).buckets
    return replace(accounts[0], ended=accounts[-1].ended, buckets=buckets)


def timeline_note(report: RunReport) -> str:
    """Return what the marks of the timeline are, and what it leaves out."""
    num = len(_known(report))
    note = (
        "Dots are saves; at the end a cross is a fault, a square a stop, and a disc the end of "
        "training."
    )
    if num > MOST_ROWS:
        note = f"All attempts stand in one row, since there are {num:,}; saves are left out."
        if (shared := _attempts_a_bar(num, WIDE)) > 1:
            note += f" {shared} neighbours share a bar."
    if unknown := len(report.attempts) - num:
        note += f" {counted(unknown, 'attempt')} without times cannot be drawn."
    return note


def _known(report: RunReport) -> list[AttemptReport]:
    return [each for each in report.attempts if each.account is not None]


def _end(attempt: AttemptReport) -> str:
    return brief(how_it_ended(attempt), LONGEST_TIP)


def _over_time(canvas: Canvas, attempts: Sequence[AttemptReport]) -> None:
    """Let the x axis reach from the first launch to the last end."""
    accounts = [each.account for each in attempts if each.account is not None]
    first, last = accounts[0].began, max(each.ended for each in accounts)
    margin = 0.02 * max(last - first, 1.0)
    canvas.axes.set_xlim(days(first - margin), days(last + margin))
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


def _save_dots(canvas: Canvas, attempt: AttemptReport, row: int, most: int) -> None:
    rows = list(attempt.saves.rows)
    thin(rows, most)
    for each in rows:
        count = "" if each.count == 1 else f", the last of {counted(each.count, 'save')}"
        canvas.dots(
            [days(each.at)],
            [row + 0.2],
            "surface",
            marker="o",
            markersize=3 if canvas.is_narrow else 4,
            markeredgecolor=COLORS["ink"],
            markeredgewidth=0.8,
            gid=canvas.mark(f"{each.snapshot} saved {output.when(each.at)}{count}", "saves"),
        )


def _end_mark(canvas: Canvas, attempt: AttemptReport, height: float) -> None:
    account = attempt.account
    if account is None or attempt.how == "alive":
        return
    good = attempt.how in _GOOD
    canvas.dots(
        [days(account.ended)],
        [height],
        "good" if good else "bad",
        marker=("s" if attempt.how == "stopped" else "o") if good else "X",
        markersize=6 if canvas.is_narrow else 9,
        markeredgecolor=COLORS["surface"],
        gid=canvas.mark(f"attempt {attempt.attempt} {_end(attempt)}, {output.when(account.ended)}"),
    )


def _buckets(width: int, report: RunReport) -> Canvas:
    """Draw the seconds of each bucket, the longest first."""
    account = report.status.account
    spent = {name: seconds for name, seconds in account.buckets.items() if seconds > 0}
    names = sorted(spent, key=lambda name: -spent[name])
    labels = [LABELS[name][0] for name in names]
    left = 14.0 + 6.9 * max(map(len, labels))
    canvas = Canvas("buckets", width, 30 * len(names) + 22, left=left)
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


def _stages(width: int, rows: Sequence[SaveRow]) -> Canvas:
    """Draw how long each stage of a save took, over time."""
    canvas = Canvas("stages", width, 330 if width == WIDE else 280, left=58)
    shown = list(rows)
    thin(shown, MOST_MARKS[width])
    stages = stages_of(shown)
    canvas.axes.set_yscale("log")
    for index, (stage, values) in enumerate(stages.items()):
        color = f"s{index % NUM_SERIES}"
        for part in _by_attempt(values):
            xs = [days(row.at) for row, _ in part]
            ys = [max(seconds, LEAST_S) for _, seconds in part]
            canvas.dots(xs, ys, color, linewidth=1.5, gid=canvas.mark("", stage))
        for row, seconds in values:
            count = "" if row.count == 1 else f", the slowest of {counted(row.count, 'save')}"
            tip = f"{row.snapshot}, {output.when(row.at)}: {stage} {stage_time(seconds)}{count}"
            how = {"marker": "o", "markersize": 5, "gid": canvas.mark(tip, stage)}
            canvas.dots([days(row.at)], [max(seconds, LEAST_S)], color, **how)
    known = [max(seconds, LEAST_S) for values in stages.values() for _, seconds in values]
    margin = 0.02 * max(shown[-1].at - shown[0].at, 1.0)
    canvas.axes.set_xlim(days(shown[0].at - margin), days(shown[-1].at + margin))
    canvas.axes.set_ylim(min(known) / 1.4, 1.4 * max(known))
    duration_axis(canvas.axes.yaxis)
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


def _sizes(width: int, rows: Sequence[SaveRow]) -> Canvas:
    """Draw the bytes of each save, and of the older files that it refers to."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    canvas = Canvas("sizes", width, 240, left=64)
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


def _loss(width: int, advice: Recommendation, every_s: float | None) -> Canvas:
    """Draw the expected loss against the interval of saves."""
    from matplotlib.ticker import FuncFormatter

    canvas = Canvas("loss", width, 260, left=58)
    (name, interval_s), *_ = advice.plan.intervals.items()
    points = advice.curve(name, also_s=every_s)
    canvas.axes.plot(*zip(*points, strict=True), color=COLORS["accent"], linewidth=2)
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
        edge = COLORS["surface"]
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
    duration_axis(canvas.axes.xaxis)
    canvas.grid("y")
    return canvas
