"""One JSON line a case, and what all lines of a file amount to, family by family."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tests.campaign import cases, families
from tests.campaign.check import at_one_place, is_stop, reached
from tests.campaign.launch import library_commit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.campaign.cases import Case
    from tests.campaign.drive import Ended
    from tests.campaign.watch import Scene

CASES, INSIDE, EACH, REAL = 300, 0.6, 10, 20  # the quotas of issue 1
STOPPED_RUNS = 100  # the quota of the family "one-rank"


def line_of(
    family: str, case: Case, attempts: list[Ended], wrong: list[str], scene: Scene
) -> dict[str, Any]:
    """What is kept of one case. A stop whose moment never came is left out."""
    shot = [ended for ended in attempts if ended.shot is not None]
    one_rank, old = family == families.ONE_RANK, family == families.RANDOM
    return {
        "seed": case.seed,
        **({} if old else {"family": family, "commit": library_commit()}),
        "drawn_by": families.drawn_by(family),
        "settings": asdict(case.settings),
        **({"chain": case.title} if family == families.RESHARD else {}),
        "launcher": case.launcher,
        "stops": [
            _stop(case, ended, scene) | (_supervised(case, ended, scene) if one_rank else {})
            for ended in shot
        ],
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


def _supervised(case: Case, ended: Ended, scene: Scene) -> dict[str, Any]:
    """What is counted of the stops of `trainckpt run`: nothing if the run had finished."""
    (code,) = ended.codes
    if not is_stop(ended):
        return {"rank": _rank(case, ended), "code": code}
    return {
        "rank": _rank(case, ended),
        "code": code,
        "ended": ended.outcome or "in start-up",
        "one_place": at_one_place(ended, scene, case.settings),
        "epoch_ends": _epoch_ends(reached(ended, scene, 0, case.settings.accumulate), scene),
    }


def _rank(case: Case, ended: Ended) -> int:
    return int(ended.stop.fraction * case.settings.ranks)


def _epoch_ends(place: tuple[int, int] | None, scene: Scene) -> bool:
    """Whether the last micro-batch before `place` and the one after it have other epochs."""
    lines = [json.loads(line) for line in scene.lines(0)]
    before = [line["epoch"] for line in lines if (line["step"], line["micro"]) < (place or (0, 0))]
    after = [line["epoch"] for line in lines if (line["step"], line["micro"]) == place]
    return bool(before and after) and before[-1] != after[0]


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
    """Of each family that is there: the distribution, and whether the quotas are met."""
    own = {name: [one for one in lines if families.of(one) == name] for name in families.FAMILIES}
    if not lines:
        return _summary([])
    summaries = _summary, _one_rank, _layouts, _reshard
    return "\n\n".join(
        told(own[name]) for name, told in zip(own, summaries, strict=True) if own[name]
    )


def _layouts(lines: list[dict[str, Any]]) -> str:
    """The family "layouts": by layout and number of ranks."""
    layout = "{parallel} {ranks}".format_map
    parts = [
        _head(lines, "of FSDP, HSDP and tensor parallel"),
        _table("layout", lines, lambda line: {layout(line["settings"])}),
        _table("category", lines, lambda line: {s["category"] for s in line["stops"]}),
        _table("signal", lines, lambda line: {s["signal"] for s in line["stops"]}),
        _table("ended", lines, lambda line: {s["ended"] for s in line["stops"]}),
        _table("launcher", lines, lambda line: {line["launcher"]}),
        _table("workers", lines, lambda line: {line["settings"]["workers"]}),
        _ends(lines),
    ]
    return "\n".join(parts)


def _reshard(lines: list[dict[str, Any]]) -> str:
    """The family "reshard": by chain of layouts."""
    parts = [
        _head(lines, "that went on in other layouts"),
        _table("chain", lines, lambda line: {line["chain"].partition(",")[0]}),
        _table("signal", lines, lambda line: {s["signal"] for s in line["stops"]}),
        _table("workers", lines, lambda line: {line["settings"]["workers"]}),
        _ends(lines),
    ]
    return "\n".join(parts)


def _head(lines: list[dict[str, Any]], what: str) -> str:
    ok, seconds = sum(line["ok"] for line in lines), sum(line["seconds"] for line in lines)
    stops = sum(len(line["stops"]) for line in lines)
    return f"{len(lines)} cases {what}, {ok} ok, {stops} stops, {seconds / len(lines):.1f} s a case"


def _ends(lines: list[dict[str, Any]]) -> str:
    stops = [stop for line in lines for stop in line["stops"]]
    inside = sum(stop["inside_window"] for stop in stops)
    failed = [line["seed"] for line in lines if not line["ok"]]
    rows = [
        (not failed, f"{len(failed)} failed{': seeds ' if failed else ''}{str(failed)[1:-1]}"),
        (inside >= INSIDE * len(stops), f"{inside} of {len(stops)} stops inside a window"),
    ]
    return "\n".join(f"{'met    ' if met else 'NOT MET'}  {text}" for met, text in rows)


def _one_rank(lines: list[dict[str, Any]]) -> str:
    """The family "one-rank": `trainckpt run`, SIGTERM to one rank alone."""
    stops = [
        (line["settings"]["ranks"], s)
        for line in lines
        for s in line["stops"]
        if s["ended"] != "finished"
    ]
    runs = Counter(ranks for ranks, _ in stops)
    of_cases = Counter(line["settings"]["ranks"] for line in lines)
    by_ranks = ", ".join(f"{runs[n]} of {n} ranks ({of_cases[n]} cases)" for n in sorted(runs))
    start_up = sum(s["ended"] == "in start-up" for _, s in stops)
    placed = [s for _, s in stops if s["ended"] == "stopped"]
    at_one, code = (sum(s["one_place"] for s in placed), sum(s["code"] == 75 for _, s in stops))
    inside, between = (sum(s[key] for s in placed) for key in ("inside_window", "epoch_ends"))
    failed = [line["seed"] for line in lines if not line["ok"]]
    seconds = sum(line["seconds"] for line in lines) / max(1, len(lines))
    head = f"{len(lines)} cases of trainckpt run, SIGTERM to one rank alone, {seconds:.1f} s a case"
    where = (
        f"{inside} inside a window, {len(placed) - inside} between two; {between} between epochs"
    )
    rows = [
        (len(stops) >= STOPPED_RUNS, f"{len(stops)} of {STOPPED_RUNS} stopped runs: {by_ranks}"),
        (
            at_one == len(placed),
            f"{at_one} of {len(placed)} that had begun: all ranks at one place",
        ),
        (code == len(stops), f"{code} of {len(stops)} ended with 75 ({start_up} in start-up)"),
        (not failed, f"{len(failed)} cases failed{': seeds' * bool(failed)} {str(failed)[1:-1]}"),
    ]
    shown = [f"{'met    ' if met else 'NOT MET'}  {text.strip()}" for met, text in rows]
    return "\n".join([head, where, *shown])


def _summary(lines: list[dict[str, Any]]) -> str:
    stops = [stop for line in lines for stop in line["stops"]]
    ok, seconds = sum(line["ok"] for line in lines), sum(line["seconds"] for line in lines)
    each = seconds / max(1, len(lines))
    parts = [
        f"{len(lines)} cases, {ok} ok, {len(stops)} stops, {each:.1f} s a case",
        _table("category", lines, lambda line: {s["category"] for s in line["stops"]}),
        _table("signal", lines, lambda line: {s["signal"] for s in line["stops"]}),
        _table("ended", lines, lambda line: {s["ended"] for s in line["stops"]}),
        _table("launcher", lines, lambda line: {line["launcher"]}),
        *(
            _table(name, lines, lambda line, name=name: {line["settings"][name]})
            for name in ("model", "parallel", "ranks", "accumulate", "workers", "dropout")
        ),
        _table("stops", lines, lambda line: {len(line["stops"])}),
        _quotas(lines, stops),
    ]
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
        (
            min(share, of_stops) >= INSIDE,
            f"{share:.0%} of cases, {of_stops:.0%} of stops inside a window",
        ),
        *(
            (category[name] >= EACH, f"{category[name]} cases hit {words} (at least {EACH})")
            for name, words in (
                (cases.SAVE, "a save"),
                (cases.START_UP, "the start-up"),
                (cases.WORKERS, "the start of workers"),
            )
        ),
        (real >= REAL, f"{real} cases of the real torchrun (at least {REAL})"),
    ]
    return "\n".join(f"{'met    ' if met else 'NOT MET'}  {text}" for met, text in rows)
