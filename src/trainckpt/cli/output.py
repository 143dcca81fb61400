"""Print: tables for people, one JSON document for programs, progress and notes on stderr.

Notes on stderr never end the work: in `trainckpt run ... 2>&1 | tee log`, Ctrl-C ends `tee` first,
and the closed pipe changes no exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


NAMES = ("id", "name", "snapshot", "tensor", "attempt")  # what people type or look for
MOST_WIDE = 220  # columns of a table
NO_SCREEN = 120  # columns where no terminal says
LITTLE = 1.1  # what is wider by so little fits if some words go to a second line
LEAST_WHOLE_S, MOST_PARTS = 10.0, 2  # of a duration
UNITS = ("B", "KB", "MB", "GB", "TB")


def count(word: str) -> int:
    """Parse an option's value as a number from 1 on."""
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 1 on")
    return number


def document(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print a table on stdout, as wide as it needs to be: a narrow terminal breaks its lines.

    Columns of a few letters each, or names that are cut, would say less.
    """
    console = _Output()
    rich_table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        rich_table.add_column(column, overflow="fold", no_wrap=column in NAMES)
    for row in rows:
        rich_table.add_row(*map(escape, row))  # a name may hold what rich takes for its markup
    if not console.is_terminal:
        console = _Output(width=MOST_WIDE)
    elif _width(console, rich_table) > console.width:
        rich_table.pad_edge, rich_table.collapse_padding = False, True
        width = _width(console, rich_table)
        if width > LITTLE * console.width:
            console = _Output(width=width, height=console.height)
    console.print(rich_table)


def _width(console: Console, drawn: Table) -> int:
    wide_options = console.options.update(max_width=MOST_WIDE)
    return console.measure(drawn, options=wide_options).maximum


def progress() -> Progress:
    """Show a bar on stderr, and remove it at the end."""
    return Progress(console=_Aside(stderr=True), transient=True)


class _Output(Console):
    """Console of a verb's output; on a broken pipe the verb decides, where rich exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(**how: Any) -> Console:
    """Return a console on stdout; a terminal gets colors, anything else plain text."""
    return _Output(highlight=False, **how)


def screen() -> Console:
    """Return a console for what a verb draws: as wide as the terminal; without one, `NO_SCREEN`."""
    drawn = console()
    return drawn if drawn.is_terminal else console(width=NO_SCREEN)


class _Aside(Console):
    """Console beside a verb's output; a broken pipe does not end the work."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a number of at least one: `1.2 GB`."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def span(seconds: float) -> str:
    """Seconds in the largest unit that leaves a number of at least one: `1.5 h`."""
    for unit, unit_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.2g} s"


def when(created: float) -> str:
    """Format a time in the local style."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: `25 s`, `3 min 10 s`, `2 h 14 min`."""
    if seconds < LEAST_WHOLE_S:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length and len(parts) < MOST_PARTS:
            parts.append(f"{left // length} {unit}")
        elif parts:
            break
        left %= length
    return " ".join(parts)


def text(value: object) -> str:
    """Format a value that may be missing; "" for None."""
    return "" if value is None else str(value)


def tell(line: str) -> None:
    """One line; the reader may be gone, the terminal hung up, the disk of the log full."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
