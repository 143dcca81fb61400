"""Write a report as one page of HTML, which needs no network and asks for none.

    report_page.html   template of Jinja, which escapes every text of the run
    report_page.css    colors for light and dark, widths from 390 pixels on
    report_page.js     tips and legends; without it the page has the same content
    report_charts.py   the pictures, drawn on report_canvas.py

The page forbids itself the network, and all styles and scripts but its own two, by a
Content-Security-Policy. Beside each picture stands a table with the same figures. Whatever a run
holds, the page stays short: rows and characters have limits, and it says what it leaves out.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import statistics
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.goodput import name_in_ml_goodput
from trainckpt.cli import output, report_canvas, report_charts
from trainckpt.cli.report import (
    LONGEST,
    advice_rows,
    brief,
    how_it_ended,
    loss_sentence,
    merged_note,
    rows_of,
    stage_time,
    stage_times,
    stages_of,
    steps_of,
    totals_of,
    zone_of,
)
from trainckpt.cli.status import LABELS, counted, state_of
from trainckpt.errors import ConfigurationError
from trainckpt.format.save_history import thin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.save_history import SaveRow
    from trainckpt.inspect.run_report import RunReport

SHOWN_SAVES = report_charts.MOST_MARKS[report_canvas.WIDE]  # rows of a table
SHOWN_ATTEMPTS, SHOWN_CHECKPOINTS = 300, 100
HINT = "name a file such as report.html, in a folder where you may write"
GOOD, BAD, PLAIN = "good", "bad", "plain"  # classes of the style sheet
TONES = {"finished": GOOD, "alive": GOOD, "stopped": PLAIN}


@dataclass(frozen=True)
class PageTable:
    """One table of the page.

    Attributes:
        caption: What it shows.
        columns: Their names.
        rows: Texts, as many as columns; a row's first cell is its head.
        numbers: Columns of numbers, which are aligned.
        tones: Class of each row, or "".
        note: What is left out, or "".
    """

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[int, ...] = ()
    tones: tuple[str, ...] = ()
    note: str = ""


def write_page(report: RunReport, file: Path) -> int:
    """Write the page; return its size in bytes.

    Raises:
        ConfigurationError: the extra is not installed, or the file cannot be written.
    """
    if str(file) == "-":
        raise ConfigurationError("--html writes a file, and - names none", hint=HINT)
    data = build_page(report).encode("utf-8", "replace")  # a path may have bytes that are no text
    try:
        _write(file, data)
    except OSError as error:
        raise ConfigurationError(
            f"the page cannot be written to {file}: {error.strerror}", hint=HINT
        ) from error
    return len(data)


def _write(file: Path, data: bytes) -> None:
    """Write a file at once: whoever reads it, and a full disk, meet the old page or the new one.

    A link stays one, and a file that is replaced leaves its permissions. What is no plain file,
    such as a pipe, is written to.
    """
    if file.exists() and not file.is_file():
        file.write_bytes(data)
        return
    target = Path(os.path.realpath(file))
    temporary = target.with_name(f".trainckpt-report-{os.urandom(8).hex()}")
    try:
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def build_page(report: RunReport) -> str:
    """Return the page.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError(
            "a page of HTML needs the package jinja2, which is not installed",
            hint=report_canvas.INSTALL,
        ) from error
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_read),
    )
    style, script = _read("report_page.css"), _read("report_page.js")
    rows = rows_of(report)
    shown = list(rows)
    thin(shown, SHOWN_SAVES)
    return environment.get_template("report_page.html").render(
        policy=_policy(style, script),
        style=style,
        script=script,
        pictures=report_charts.draw(report, shown),
        **_content(report, rows, shown),
    )


def _read(name: str) -> str:
    return resources.files("trainckpt.cli").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy: nothing from anywhere but this style and script."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _content(
    report: RunReport, rows: Sequence[SaveRow], shown: Sequence[SaveRow]
) -> dict[str, Any]:
    """Return the texts and tables of the page; `shown`: the rows, thinned."""
    status = report.status
    return {
        "run": report.run,
        "state": state_of(status),
        "tone": TONES.get(status.state, BAD if report.attempts else PLAIN),
        "when": output.when(status.when),
        "zone": zone_of(status.when),
        "tiles": _tiles(report),
        "attempts": _attempts(report),
        "buckets": _buckets(report),
        "totals": totals_of(report),
        "merged": merged_note(rows),
        "stages": _stages(rows),
        "saves": _saves(shown),
        "checkpoints": _checkpoints(report),
        "tiers": _tiers(report),
        "troubles": _troubles(report),
        "advice": PageTable(
            caption="Options",
            columns=("option", "now", "advised", "because"),
            rows=advice_rows(report),
        ),
        "loss": loss_sentence(report),
        "why_no_advice": report.why_no_advice,
        "timeline_note": report_charts.timeline_note(report),
    }


def _tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """Return label, figure and a few words for each tile."""
    account, saves = report.status.account, report.saves
    tiles = []
    if account.wall_s > 0:
        share = 100 * (account.goodput or 0.0)
        attempts = counted(len(account.attempts), "attempt")
        tiles.append(("Training", f"{share:.1f} %", "of the wall time"))
        tiles.append(("Wall time", output.duration(account.wall_s), f"in {attempts}"))
        again = counted(account.repeated.steps, "step")
        tiles.append(("Trained again", again, "after faults and stops"))
    if report.status.reached.steps:
        tiles.append(("Step", f"{report.status.reached.steps:,}", "reached"))
    tiles.append(("Saves", f"{saves.committed:,}", f"{output.size(saves.num_bytes)} written"))
    lost = saves.skipped + saves.failed
    if report.attempts:
        tiles.append(("Not saved", f"{lost:,}", "skipped or failed"))
    return tiles


def _attempts(report: RunReport) -> PageTable:
    shown = report.attempts[-SHOWN_ATTEMPTS:]
    rows = []
    for each in shown:
        account = each.account
        ranks = "" if each.world is None else counted(each.world, "rank")
        hosts = f" on {counted(len(each.hosts), 'host')}" if each.hosts else ""
        begins = {None: "nothing chosen", "": "step 0"}.get(each.parent, each.parent or "")
        rows.append(
            (
                str(each.attempt),
                "" if account is None else output.when(account.began),
                "" if account is None else output.duration(account.ended - account.began),
                begins,
                steps_of(each),
                f"{each.saves.committed:,}",
                ranks + hosts,
                how_it_ended(each),
            )
        )
    left_out = len(report.attempts) - len(shown)
    note = f"The last {len(shown):,} of {len(report.attempts):,} attempts." if left_out else ""
    return PageTable(
        caption="Attempts",
        columns=("no.", "began", "lasted", "from", "steps", "saves", "ranks", "how it ended"),
        rows=rows,
        numbers=(5,),
        tones=tuple(TONES.get(each.how, BAD) for each in shown),
        note=note,
    )


def _buckets(report: RunReport) -> PageTable:
    account = report.status.account
    spent = sorted(account.buckets.items(), key=lambda each: -each[1])
    rows = [
        (
            LABELS[name][0],
            output.duration(seconds),
            f"{100 * seconds / account.wall_s:.2f} %",
            name_in_ml_goodput(name),
        )
        for name, seconds in spent
        if seconds > 0
    ]
    return PageTable(
        caption="Where the time went",
        columns=("bucket", "time", "share", "in ml-goodput-measurement"),
        rows=rows,
        numbers=(1, 2),
    )


def _stages(rows: Sequence[SaveRow]) -> PageTable:
    table = []
    for stage, values in stages_of(rows).items():
        seconds = [each for _, each in values]
        median, most = statistics.median(seconds), max(seconds)
        table.append((stage, stage_time(median), stage_time(most), f"{len(seconds):,}"))
    return PageTable(
        caption="Stages of a save, from its boundary on",
        columns=("stage", "median", "slowest", "rows" if merged_note(rows) else "saves"),
        rows=table,
        numbers=(1, 2, 3),
    )


def _saves(shown: Sequence[SaveRow]) -> PageTable:
    stages = list(stages_of(shown))
    table = [
        (
            row.snapshot,
            output.when(row.at),
            f"{row.count:,}",
            output.size(row.num_bytes),
            output.size(row.reached_bytes) if row.reached_bytes else "",
            *(stage_time(own[stage]) if stage in own else "" for stage in stages),
        )
        for row, own in ((row, stage_times(row)) for row in shown)
    ]
    return PageTable(
        caption="Saves",
        columns=("checkpoint", "saved", "saves", "written", "refers to", *stages),
        rows=table,
        numbers=tuple(range(2, 5 + len(stages))),
        note=merged_note(shown),
    )


def _checkpoints(report: RunReport) -> PageTable:
    shown = report.checkpoints[:SHOWN_CHECKPOINTS]
    rows = []
    for each in shown:
        remarks = [*each.tags, *(["encrypted"] if each.encrypted else [])]
        usable = "yes" if each.usable else f"no: {each.why_not}"
        rows.append(
            (
                each.name,
                "" if each.created is None else output.when(each.created),
                "" if each.num_bytes is None else output.size(each.num_bytes),
                output.size(each.reached_bytes) if each.reached_bytes else "",
                f"{len(each.tiers)}: {', '.join(each.tiers)}" if each.tiers else "none",
                brief(each.because, LONGEST),
                brief(", ".join(remarks), LONGEST),
                brief(usable, LONGEST),
            )
        )
    left_out = len(report.checkpoints) - len(shown)
    note = f"The newest {len(shown):,} of {len(report.checkpoints):,}." if left_out else ""
    return PageTable(
        caption="Checkpoints and their copies",
        columns=("name", "saved", "size", "refers to", "in tiers", "why", "tags", "usable"),
        rows=rows,
        numbers=(2, 3),
        tones=tuple("" if each.usable else BAD for each in shown),
        note=note,
    )


def _tiers(report: RunReport) -> PageTable:
    rows = []
    for each in report.status.tiers:
        behind = "" if each.lag_steps is None else counted(each.lag_steps, "step")
        age = "" if each.age_s is None else output.duration(each.age_s)
        state = f"does not answer: {each.why_not}" if each.why_not else "answers"
        newest = each.snapshot or ("unknown" if each.why_not else "none")
        rows.append((each.tier, each.url or "", newest, age, behind, state))
    return PageTable(
        caption="Tiers",
        columns=("tier", "place", "newest", "age", "behind", "now"),
        rows=rows,
        tones=tuple(BAD if each.why_not else "" for each in report.status.tiers),
    )


def _troubles(report: RunReport) -> PageTable:
    rows = [
        (
            f"{each.what} {each.name}",
            "" if each.when is None else output.when(each.when),
            each.how,
            each.reason,
        )
        for each in reversed(report.troubles)
    ]
    left_out = report.num_troubles - len(rows)
    note = f"The last {len(rows):,} of {report.num_troubles:,} on record." if left_out else ""
    return PageTable(
        caption="Refused and failed",
        columns=("what", "when", "how", "why"),
        rows=rows,
        note=note,
    )
