"""status: tell how a run is: alive or not, its step and pace, and its newest checkpoints.

`--watch` draws it anew every second on a terminal, and less often where a look takes long. Without
a terminal it prints it again and again, as text.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainckpt.attempt import goodput
from trainckpt.attempt.live_status import EVALUATING, LEAVING, STARTING, TRAINING
from trainckpt.cli import output
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED
from trainckpt.inspect.run_status import ALIVE, DEAD, NONE, read_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import RenderableType

    from trainckpt.attempt.live_status import LiveStatus, NextSave, UploadNow
    from trainckpt.inspect.run_status import RunStatus, TierNow

EVERY_S, IN_A_LOG_S = 1.0, 10.0
LOOK_SHARE = 0.2  # most of the time that looking may take
BAR_WIDTH, WIDEST = 24, 100
# Heartbeats of a supervisor have no status, nor do those of older releases.
UNKNOWN = "unknown: it has no Checkpointer, is being dumped, or is of an older release"
FULL, PART, REST = "━", "╸", "─"

# bucket -> its name here, and its color
LABELS = {
    goodput.TRAINING: ("training", "green"),
    goodput.PREPARATION: ("start-up", "blue"),
    goodput.RESTORE: ("restore", "cyan"),
    goodput.SAVE: ("waits for saves", "yellow"),
    goodput.EVALUATION: ("evaluation", "magenta"),
    goodput.WASTED: ("repeated training", "red"),
    goodput.LEAVING: ("leaving", "bright_blue"),
    goodput.GAP: ("between attempts", "bright_black"),
    goodput.OTHER: ("unknown", "white"),
}
COLORS = {
    ALIVE: "bold green",
    FINISHED: "bold green",
    STOPPED: "bold blue",
    FAILED: "bold red",
    KILLED: "bold red",
    DEAD: "bold red",
    NONE: "dim",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument(
        "--watch", action="store_true", help="show it until Ctrl-C, and draw it anew every second"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the status; or show it until interrupted."""
    if arguments.watch and arguments.json:
        raise ConfigurationError(
            "--watch draws a screen, and --json prints one document", hint="leave out one of them"
        )
    status = read_status(arguments.run)
    if arguments.json:
        output.document(status.to_json())
        return 0
    console = output.screen()
    if arguments.watch:
        _watch(console, arguments.run, status)
        return 0
    console.print(render(status))
    return 0


def _watch(console: Console, run: str, status: RunStatus) -> None:
    """Show it until interrupted; on a terminal, the last look stays."""
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            console.print(render(status))
            for look in _looks(run, IN_A_LOG_S):
                console.print(render(look))
        with Live(render(status), console=console, auto_refresh=False, screen=True) as live:
            for look in _looks(run, EVERY_S):
                status = look
                live.update(render(look), refresh=True)
    if console.is_terminal:
        console.print(render(status))


def _looks(run: str, every_s: float) -> Iterator[RunStatus]:
    """Yield the status again and again."""
    took_s = 0.0
    while True:
        time.sleep(max(every_s, took_s / LOOK_SHARE))
        begun_s = time.monotonic()
        yield read_status(run)
        took_s = time.monotonic() - begun_s


# ---- the page


def render(status: RunStatus) -> RenderableType:
    """Return the status for people."""
    parts: list[RenderableType] = [Text(), headline(status), Text(), _facts(status)]
    if status.tiers:
        parts += [Text(), _tiers(status)]
    if status.account.wall_s > 0:
        parts += [Text(), *times_of(status)]
    return Group(*parts)


def headline(status: RunStatus) -> Text:
    """Return the run and its state, in one line."""
    head = Text("  ")
    head.append(status.run, style="bold")
    head.append("  ")
    head.append(state_of(status), style=COLORS.get(status.state, "bold"))
    return head


def state_of(status: RunStatus) -> str:
    """Return in words whether it is alive, and since when."""
    since_s = None if status.since is None else max(status.when - status.since, 0.0)
    ago = "" if since_s is None else f" {output.duration(since_s)} ago"
    if status.state == NONE:
        return "no attempt has begun"
    if status.is_alive:
        return "alive" if since_s is None else f"alive for {output.duration(since_s)}"
    if status.state == DEAD:
        damage = f": {status.reason}" if status.reason else ""
        return f"not alive: it ended{ago} without a record{damage}"
    reason = "" if status.reason in ("", "final") else f": {status.reason}"
    return f"{status.state}{ago}{reason}"


def _facts(status: RunStatus) -> Table:
    rows = Table.grid(padding=(0, 2), pad_edge=True)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in _rows(status):
        rows.add_row(f"  {name}", value)
    return rows


def _rows(status: RunStatus) -> Iterator[tuple[str, RenderableType]]:
    if status.attempt:
        ranks = "" if status.world is None else f", {counted(status.world, 'rank')}"
        hosts = f" on {', '.join(status.hosts[:4])}" if status.hosts else ""
        more = f" and {len(status.hosts) - 4} more" if len(status.hosts) > 4 else ""
        code = "" if status.exit_code is None else f", exit code {status.exit_code}"
        yield "attempt", escape(f"{status.attempt}{hosts}{more}{ranks}{code}")
        yield "step", _step(status)
    live = status.live
    if live is None:
        if status.is_alive:
            yield "now", UNKNOWN
        return
    yield "now", _now(live)
    if live.saving is not None:
        yield "saving", _saving(status)
    if live.next_saves and live.phase != LEAVING:
        soon = [_next(each, status) for each in live.next_saves]
        yield "next save", ", ".join(soon)
    if live.skipped or live.failed:
        yield "not saved", _not_saved(live, status.when)


def _step(status: RunStatus) -> str:
    done = status.reached.steps - status.begun.steps
    pace = "" if status.steps_per_s is None else f", {_pace(status.steps_per_s)}"
    return f"[bold]{status.reached.steps:,}[/bold], {done:,} in this attempt{pace}"


def _pace(steps_per_s: float) -> str:
    if steps_per_s >= 1:
        return f"{steps_per_s:.1f} steps/s"
    return f"{output.duration(1 / steps_per_s)} a step"


def _now(live: LiveStatus) -> str:
    doing = {
        STARTING: "starting",
        TRAINING: "training",
        EVALUATING: "evaluating",
        LEAVING: "leaving",
    }.get(live.phase, "unknown")
    if live.stop is None:
        return doing
    why = f" by {escape(live.stop.reason)}" if live.stop.reason else ""
    left = "no deadline"
    if live.stop.seconds_left is not None:
        left = f"{output.duration(live.stop.seconds_left)} until its deadline"
    return f"[bold yellow]stopping{why}[/bold yellow], {left}; {doing}"


def _saving(status: RunStatus) -> RenderableType:
    live = status.live
    assert live is not None
    assert live.saving is not None
    saving = live.saving
    gone_s = saving.seconds + max(status.when - live.written, 0.0)
    share = None
    if status.written_bytes is not None and saving.num_bytes:
        share = status.written_bytes / saving.num_bytes
    elif saving.predicted_s:
        share = min(gone_s / saving.predicted_s, 1.0)
    left_s = None
    if share:
        left_s = gone_s * (1 - share) / share
    elif saving.predicted_s is not None:
        left_s = max(saving.predicted_s - gone_s, 0.0)
    where = " to memory" if saving.in_memory else ""
    return _progress(f"{saving.snapshot}{where}", share, saving.num_bytes, left_s)


def _progress(what: str, share: float | None, num_bytes: int, left_s: float | None) -> str:
    """Return a bar with bytes and time left."""
    bar = "" if share is None else f"{bar_of(share)} "
    done = "" if share is None else f"{output.size(int(share * num_bytes))} of "
    left = "" if left_s is None else f", {output.duration(left_s)} left"
    return f"{escape(what)}  {bar}{done}{output.size(num_bytes)}{left}"


def bar_of(share: float, width: int = BAR_WIDTH) -> str:
    """Return a bar, in rich's markup."""
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    filled = FULL * (halves // 2) + PART * (halves % 2)
    return f"[green]{filled}[/green][bright_black]{REST * (width - len(filled))}[/bright_black]"


def _next(due: NextSave, status: RunStatus) -> str:
    where = " (to memory)" if due.in_memory else ""
    live = status.live
    if due.at_step is not None:
        steps = due.at_step - status.reached.steps
        step_s = live.step_s if live is not None else None
        soon = "" if step_s is None or steps <= 0 else f", in {output.duration(steps * step_s)}"
        return f"at step {due.at_step:,}{soon}{where}"
    age_s = max(status.when - live.written, 0.0) if live is not None else 0.0
    return f"in {output.duration(max((due.in_s or 0.0) - age_s, 0.0))}{where}"


def _not_saved(live: LiveStatus, when: float) -> str:
    counts = [
        f"[yellow]{number} {how}[/yellow]"
        for number, how in ((live.skipped, "skipped"), (live.failed, "failed"))
        if number
    ]
    text = " and ".join(counts)
    if live.not_saved:
        last = live.not_saved[-1]
        ago = output.duration(max(when - last.when, 0.0))
        text += f"; {last.snapshot} was {last.how} {ago} ago: {escape(last.reason)}"
    return text


def _tiers(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    head = ("  tier", "newest", "age", "behind", "")
    table.add_row(*head, style="dim")
    uploads = {each.tier: each for each in status.live.uploads} if status.live else {}
    for tier in status.tiers:
        table.add_row(f"  {escape(tier.tier)}", *_tier(tier), _copies(tier, uploads))
    return table


def _tier(tier: TierNow) -> tuple[str, str, str]:
    age = "" if tier.age_s is None else output.duration(tier.age_s)
    behind = "" if tier.lag_steps is None else counted(tier.lag_steps, "step")
    newest = tier.snapshot or ("?" if tier.why_not else "-")
    return escape(newest), age, behind


def _copies(tier: TierNow, uploads: dict[str, UploadNow]) -> str:
    if tier.why_not:
        return f"[red]does not answer: {escape(tier.why_not)}[/red]"
    copies = uploads.get(tier.tier)
    if copies is None:
        return ""
    said = []
    if copies.snapshot:
        share = copies.copied_bytes / copies.num_bytes if copies.num_bytes else None
        said.append(_progress(copies.snapshot, share, copies.num_bytes, copies.seconds_left))
    if copies.waiting > bool(copies.snapshot):
        said.append(f"{copies.waiting - bool(copies.snapshot)} waiting")
    if copies.skipped:
        said.append(f"{copies.skipped} left out")
    if copies.failed:
        said.append(f"[yellow]{counted(copies.failed, 'failure')}[/yellow]")
    if copies.trouble:
        said.append(f"[yellow]{escape(copies.trouble)}[/yellow]")
    return ", ".join(said)


def times_of(status: RunStatus) -> Iterator[RenderableType]:
    """Yield where the time went: a line, a bar, and a legend."""
    account = status.account
    share = 100 * (account.goodput or 0.0)
    attempts = counted(len(account.attempts), "attempt")
    line = f"{output.duration(account.wall_s)} in {attempts}, {share:.1f} % of it training"
    if account.repeated.steps:
        line += f", {counted(account.repeated.steps, 'step')} trained again"
    yield Text(f"  {line}")
    spent = {name: seconds for name, seconds in account.buckets.items() if seconds > 0}
    yield _StackedBar(spent)
    yield _Legend(spent)


class _StackedBar:
    """A bar as wide as the console, one color for each bucket."""

    def __init__(self, spent: dict[str, float]) -> None:
        self._spent = spent

    def __rich_console__(self, console: Console, options: object) -> Iterator[Text]:
        if console.color_system is None:
            return  # without colors it says nothing
        width = min(console.width - 4, WIDEST)
        total, bar, done, drawn = sum(self._spent.values()), Text("  "), 0.0, 0
        for name in goodput.BUCKETS:
            done += self._spent.get(name, 0.0)
            until = round(width * done / total)
            bar.append("█" * (until - drawn), style=LABELS[name][1])
            drawn = until
        yield bar


class _Legend:
    """The buckets with their seconds, as many in a line as fit."""

    def __init__(self, spent: dict[str, float]) -> None:
        self._spent = spent

    def __rich_console__(self, console: Console, options: object) -> Iterator[Text]:
        width = min(console.width - 2, WIDEST)
        line = Text("  ")
        for name in sorted(self._spent, key=lambda name: -self._spent[name]):
            label, color = LABELS[name]
            entry = Text.assemble(("■ ", color), f"{label} {output.duration(self._spent[name])}")
            if line.cell_len > 2 and line.cell_len + cell_len(entry.plain) + 3 > width:
                yield line
                line = Text("  ")
            line.append("   " if line.cell_len > 2 else "")
            line.append_text(entry)
        yield line


def counted(number: int, word: str) -> str:
    """Return a number of things: `3 steps`, `1 step`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")
