"""report: report on a run: attempts, checkpoints, goodput, failures and advice.

The terminal gets a summary, which needs nothing but the core. `--html` writes the whole as one file
that works without a network (`report_page`), and needs the extra `report`.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainckpt.attempt.options import PARTNER
from trainckpt.cli import advise, output
from trainckpt.cli.status import COLORS, headline, times_of
from trainckpt.format.save_history import MOST_TIERS
from trainckpt.inspect.run_report import DAMAGED, NO_SAVES, read_report
from trainckpt.inspect.run_status import ALIVE, DEAD

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from trainckpt.format.save_history import SaveRow
    from trainckpt.inspect.run_report import AttemptReport, RunReport

SHOWN_ATTEMPTS, SHOWN_CHECKPOINTS, SHOWN_TROUBLES = 10, 8, 8  # in the terminal
LONGEST = 200  # characters of an end; the whole reason stands among what was refused and failed
IN_WORDS = {ALIVE: "alive", DEAD: "ended without a record", DAMAGED: "record damaged"}
# stage of a save -> attribute of its row; then come the tiers
OWN_STAGES = {
    "training waits": "stall_s",
    "in shared memory": "memory_s",
    "in the run directory": "local_s",
}
MILLI_S = 1.0  # below it, a stage is shown in milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the whole report there")


def execute(arguments: argparse.Namespace) -> int:
    """Print the summary or the document; write the page."""
    report = read_report(arguments.run)
    if arguments.html:
        from trainckpt.cli.report_page import write_page

        num_bytes = write_page(report, arguments.html)
        output.tell(f"wrote {arguments.html} ({output.size(num_bytes)})")
    if arguments.json:
        output.document(to_json(report))
        return 0
    output.screen().print(render(report))
    return 0


def to_json(report: RunReport) -> dict[str, Any]:
    """Return the document of `trainckpt report --json`."""
    advice = None if report.advice is None else advise.to_json(report.advice, None)
    return {**report.to_json(), "advice": advice}


# ---- texts that the page shows too


def how_it_ended(attempt: AttemptReport) -> str:
    """Return an attempt's end in words."""
    text = IN_WORDS.get(attempt.how, attempt.how)
    reason = attempt.reason if attempt.reason not in ("", "final") else ""
    return brief(f"{text}: {reason}" if reason else text, LONGEST)


def brief(text: str, longest: int) -> str:
    """Return the text, cut to so many characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def steps_of(attempt: AttemptReport) -> str:
    """Return the steps that an attempt trained, as a range."""
    account = attempt.account
    if account is None:
        return ""
    return f"{account.begun.steps:,} to {account.reached.steps:,}"


def stage_time(seconds: float) -> str:
    """Return the duration of a stage: `12 ms`, `1.3 s`."""
    if seconds >= MILLI_S:
        return output.duration(seconds)
    milli = 1000 * seconds
    return f"{milli:.0f} ms" if milli >= 10 else f"{milli:.2g} ms"


def zone_of(when: float) -> str:
    """Return the local time zone: `CET (UTC+01:00)`."""
    local = time.localtime(when)
    shift = time.strftime("%z", local)
    return f"{time.strftime('%Z', local)} (UTC{shift[:3]}:{shift[3:]})"


def rows_of(report: RunReport) -> list[SaveRow]:
    """Return the saves of all attempts, oldest first."""
    rows = [row for attempt in report.attempts for row in attempt.saves.rows]
    return sorted(rows, key=lambda row: row.at)


def stage_times(row: SaveRow) -> dict[str, float]:
    """Return stage -> seconds, nearest first."""
    own = {stage: getattr(row, name) for stage, name in OWN_STAGES.items()}
    copies = {
        "in other hosts' memory" if tier == PARTNER else f"in {tier}": seconds
        for tier, seconds in row.copies.items()
    }
    return {stage: took_s for stage, took_s in {**own, **copies}.items() if took_s is not None}


def stages_of(rows: Sequence[SaveRow]) -> dict[str, list[tuple[SaveRow, float]]]:
    """Return the stages of saves, nearest first, each with the saves that reached it."""
    stages: dict[str, list[tuple[SaveRow, float]]] = {stage: [] for stage in OWN_STAGES}
    for row in rows:
        for stage, seconds in stage_times(row).items():
            stages.setdefault(stage, []).append((row, seconds))
    shown = list(stages)[: len(OWN_STAGES) + MOST_TIERS]
    return {stage: stages[stage] for stage in shown if stages[stage]}


def merged_note(rows: Sequence[SaveRow]) -> str:
    """Return how many saves stand behind the rows; "" if each has its own."""
    saves = sum(row.count for row in rows)
    if saves == len(rows):
        return ""
    most = max(row.count for row in rows)
    return (
        f"{saves:,} saves in {len(rows):,} rows of at most {most:,}: each row has the slowest and "
        "the largest of its saves"
    )


def totals_of(report: RunReport) -> str:
    """Return in one line what became of all saves."""
    saves = report.saves
    said = [f"{saves.committed:,} committed, {output.size(saves.num_bytes)} written"]
    if saves.in_memory:
        said.append(f"{saves.in_memory:,} in memory alone")
    if saves.skipped:
        said.append(f"{saves.skipped:,} skipped")
    if saves.failed:
        said.append(f"{saves.failed:,} failed")
    if saves.not_copied:
        tries = "try" if saves.not_copied == 1 else "tries"
        said.append(f"{saves.not_copied:,} {tries} of copies failed")
    return ", ".join(said)


def advice_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Return option, value in use, advised value and reason."""
    if report.advice is None:
        return []
    rows = []
    for number, each in enumerate(report.advice.options):
        is_interval = number == 0 and report.every_s is not None
        now = f"each {output.duration(report.every_s or 0.0)}" if is_interval else ""
        rows.append((each.option, now, each.value, each.reason))
    return rows


def loss_sentence(report: RunReport) -> str:
    """Return the expected loss now and with the advice; "" without an advice."""
    advice = report.advice
    if advice is None:
        return ""
    with_it = f"{100 * advice.lost_share:.2f} %"
    if advice.now is None:
        return f"expected loss of wall time: {with_it} with this"
    return f"expected loss of wall time: {100 * advice.now:.2f} % now, {with_it} with this"


# ---- the summary in the terminal


def render(report: RunReport) -> RenderableType:
    """Return the summary for people."""
    status = report.status
    parts: list[RenderableType] = [Text(), headline(status)]
    if status.account.wall_s > 0:
        parts += [Text(), *times_of(status)]
    if report.attempts:
        parts += [Text(), *_attempts(report)]
    if report.saves != NO_SAVES:
        parts += [Text(), *_saves(report)]
    if report.checkpoints:
        parts += [Text(), *_checkpoints(report)]
    if report.troubles:
        parts += [Text(), *_troubles(report)]
    parts += [Text(), *_advice(report), Text()]
    zone = zone_of(status.when)
    parts.append(Text(f"  as of {output.when(status.when)}, times are {zone}", style="dim"))
    return Group(*parts)


def _title(name: str, more: str = "") -> Text:
    return Text.assemble(("  ", ""), (name, "bold"), (f"  {more}" if more else "", ""))


def _grid(columns: Sequence[str], *, folds: int, head: bool = True) -> Table:
    """Return an empty table; column `folds` takes what is left of the line."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for number in range(len(columns)):
        table.add_column(
            no_wrap=number != folds, overflow="fold" if number == folds else "ellipsis"
        )
    if head:
        table.add_row(*columns, style="dim")
    return table


def _attempts(report: RunReport) -> Iterator[RenderableType]:
    shown = report.attempts[-SHOWN_ATTEMPTS:]
    left_out = len(report.attempts) - len(shown)
    more = f"the last {len(shown)} of {len(report.attempts):,}" if left_out else ""
    yield _title("attempts", more)
    table = _grid(("  no.", "began", "lasted", "steps", "how it ended"), folds=4)
    for each in shown:
        account = each.account
        began = "" if account is None else output.when(account.began)
        lasted = "" if account is None else output.duration(account.ended - account.began)
        ended = Text(how_it_ended(each), style=COLORS.get(each.how, "").replace("bold ", ""))
        table.add_row(f"  {each.attempt}", began, lasted, steps_of(each), ended)
    yield table


def _saves(report: RunReport) -> Iterator[RenderableType]:
    yield _title("saves", totals_of(report))
    rows = rows_of(report)
    if not rows:
        return
    table = _grid(("  stage, from the boundary on", "median", "slowest", ""), folds=3)
    for stage, values in stages_of(rows).items():
        seconds = [each for _, each in values]
        median, most = statistics.median(seconds), max(seconds)
        table.add_row(f"  {escape(stage)}", stage_time(median), stage_time(most), "")
    yield table
    if note := merged_note(rows):
        yield Text(f"  {note}", style="dim")


def _checkpoints(report: RunReport) -> Iterator[RenderableType]:
    usable = [each for each in report.checkpoints if each.usable]
    shown = usable[:SHOWN_CHECKPOINTS]
    more = f"the newest {len(shown)} of {len(usable):,}" if len(usable) > len(shown) else ""
    yield _title("checkpoints", more or ("" if shown else "none is usable"))
    if not shown:
        return
    table = _grid(("  name", "saved", "size", "refers to", "in"), folds=4)
    for each in shown:
        when = "" if each.created is None else output.when(each.created)
        size = output.size(each.num_bytes or 0)
        older = output.size(each.reached_bytes) if each.reached_bytes else ""
        where = ", ".join([*each.tiers, *(["encrypted"] if each.encrypted else [])])
        table.add_row(f"  {each.name}", when, size, older, escape(where))
    yield table


def _troubles(report: RunReport) -> Iterator[RenderableType]:
    shown = report.troubles[-SHOWN_TROUBLES:]
    left_out = report.num_troubles > len(shown)
    more = f"the last {len(shown)} of {report.num_troubles:,} on record" if left_out else ""
    yield _title("refused and failed", more)
    table = _grid(("  when", "what", "why"), folds=2)
    for each in shown:
        when = "" if each.when is None else output.when(each.when)
        what = f"{each.what} {each.name} {each.how}"
        table.add_row(f"  {when}", Text(what, style="yellow"), Text(each.reason))
    yield table


def _advice(report: RunReport) -> Iterator[RenderableType]:
    yield _title("advice", "" if report.advice else f"none: {report.why_no_advice}")
    if report.advice is None:
        return
    table = _grid(("  option", "now", "advised", "because"), folds=3)
    for option, now, value, reason in advice_rows(report):
        table.add_row(f"  {option}", now, f"[bold]{escape(value)}[/bold]", escape(reason))
    yield table
    yield Text(f"  {loss_sentence(report)}")
