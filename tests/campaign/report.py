"""One JSON line a case, and what all lines of a file amount to."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign import cases
from tests.campaign.check import reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.campaign.cases import Case
    from tests.campaign.drive import Ended
    from tests.campaign.watch import Scene

CASES, INSIDE, EACH, REAL = 300, 0.6, 10, 20  # the quotas of issue 1
# With another cases.py a seed stands for another case.
DRAWN_BY = hashlib.sha256(Path(cases.__file__).read_bytes()).hexdigest()[:8]


def line_of(case: Case, attempts: list[Ended], wrong: list[str], scene: Scene) -> dict[str, Any]:
    """What is kept of one case. A stop whose moment never came is left out."""
    shot = [ended for ended in attempts if ended.shot is not None]
    return {
        "seed": case.seed,
        "drawn_by": DRAWN_BY,
        "settings": asdict(case.settings),
        "launcher": case.launcher,
        "stops": [_stop(case, ended, scene) for ended in shot],
        "missed": len(case.stops) - len(shot),
        "ok": not wrong,
        "why": "; ".join(wrong),
        "seconds": round(sum(ended.seconds for ended in attempts), 2),
    }


def _stop(case: Case, ended: Ended, scene: Scene) -> dict[str, Any]:
    place = reached(ended, scene, 0, case.settings.accumulate)
    return {
        "signal": ended.stop.signal,
        "target": "tree" if ended.stop.signal == cases.SIGKILL else ended.stop.target,
        "when": ended.stop.when,
        "asked": ended.stop.place,
        "category": _category(ended),
        "happened": place and {"step": place[0], "micro": place[1]},
        "inside_window": bool(place and place[1]),
        "ended": ended.outcome or "killed",
    }


def _category(ended: Ended) -> str:
    """By what was there when the signal was sent, not by what it waited for."""
    before, later = ended.shot
    if ended.stop.signal == cases.SIGTERM:
        hit = set(before.unfinished) & set(later.unfinished)
    else:
        hit = set(before.unfinished + later.unfinished) & set(ended.unfinished)
        if ended.stop.signal == cases.BOTH:
            number = (ended.record or {}).get("attempt")
            hit |= {snapshot for snapshot in ended.unfinished if snapshot.attempt == number}
    if hit:
        return cases.SAVE
    if before.lines != ended.before[0]:
        return cases.MICRO_BATCH
    return cases.WORKERS if before.workers else cases.START_UP


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(lines: list[dict[str, Any]]) -> str:
    """The distribution, and whether the quotas are met."""
    stops = [stop for line in lines for stop in line["stops"]]
    ok, seconds = sum(line["ok"] for line in lines), sum(line["seconds"] for line in lines)
    each = seconds / max(1, len(lines))
    parts = [
        f"{len(lines)} cases, {ok} ok, {len(stops)} stops, {each:.1f} s a case",
        _table("category", lines, lambda line: {s["category"] for s in line["stops"]}),
        _table("signal", lines, lambda line: {s["signal"] for s in line["stops"]}),
        _table("ended", lines, lambda line: {s["ended"] for s in line["stops"]}),
        _table("launcher", lines, lambda line: {line["launcher"]}),
        *(_table(name, lines, lambda line, name=name: {line["settings"][name]})
          for name in ("model", "parallel", "ranks", "accumulate", "workers", "dropout")),
        _table("stops", lines, lambda line: {len(line["stops"])}),
        _quotas(lines, stops),
    ]  # fmt: skip
    return "\n".join(parts)


def _table(name: str, lines: list[dict], values: Callable[[dict], set]) -> str:
    counts = Counter(value for line in lines for value in values(line))
    shown = "   ".join(f"{value}: {counts[value]}" for value in sorted(counts, key=str))
    return f"{name:12}{shown}"


def _quotas(lines: list[dict], stops: list[dict]) -> str:
    inside = sum(any(s["inside_window"] for s in line["stops"]) for line in lines)
    of_stops = sum(s["inside_window"] for s in stops) / max(1, len(stops))
    stopped = sum(bool(line["stops"]) for line in lines)  # else every stop came too late
    category = Counter(c for line in lines for c in {s["category"] for s in line["stops"]})
    real = sum(line["launcher"] == cases.TORCHRUN for line in lines)
    share = inside / max(1, len(lines))
    failed = [line["seed"] for line in lines if not line["ok"]]
    rows = [
        (stopped >= CASES, f"{stopped} of {CASES} cases that were stopped"),
        (not failed, f"{len(failed)} failed{': seeds ' if failed else ''}{str(failed)[1:-1]}"),
        (min(share, of_stops) >= INSIDE,
         f"{share:.0%} of cases, {of_stops:.0%} of stops inside a window"),
        *((category[name] >= EACH, f"{category[name]} cases hit {words} (at least {EACH})")
          for name, words in ((cases.SAVE, "a save"), (cases.START_UP, "the start-up"),
                              (cases.WORKERS, "the start of workers"))),
        (real >= REAL, f"{real} cases of the real torchrun (at least {REAL})"),
    ]  # fmt: skip
    return "\n".join(f"{'met    ' if met else 'NOT MET'}  {text}" for met, text in rows)
