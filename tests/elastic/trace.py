"""What the ranks of an elastic run have trained, and the verdict on it.

exact        every line is that of a run that was never stopped, on as many ranks
same data    the number of ranks changed: every sample of every epoch once. Ranks of equal lengths
             need padding, at the end of an epoch: less than one sample for each rank and resume
failed       all else
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

RESUMED = re.compile(r"attempt (\d+): resumed from \S+~(\d+)\.\d+, (.*)")
EXACT, SAME_DATA, FAILED = "exact", "same data", "failed"


class Line(NamedTuple):
    """One micro-batch of one rank: completed steps before it, its epoch, its sample and loss."""

    step: int
    epoch: int
    sample: int
    loss: str


@dataclass
class Start:
    """One attempt."""

    attempt: int
    world: int
    step: int
    lines: dict[int, list[Line]]  # by rank
    restarts: tuple[int, ...] = ()  # torchrun's own count, by rank


def starts(trace: Path) -> list[Start]:
    """All attempts that began, in order."""
    found: dict[int, Start] = {}
    for file in trace.glob("*.*"):
        attempt, rank = map(int, file.name.split("."))
        whole = [text for text in file.read_text().splitlines(keepends=True) if text[-1:] == "\n"]
        if not whole:
            continue
        first, *rest = map(json.loads, whole)
        start = found.setdefault(attempt, Start(attempt, first["world"], first["step"], {}))
        assert (start.world, start.step) == (first["world"], first["step"])
        start.lines[rank] = [Line(*line) for line in rest]
        start.restarts = (*start.restarts, first["restarts"])
    return [found[attempt] for attempt in sorted(found)]


def kept(attempts: list[Start]) -> dict[tuple[int, int], Line]:
    """What counts of all attempts, by step and rank: a later one begins where it resumed."""
    found: dict[tuple[int, int], Line] = {}
    for number, start in enumerate(attempts):
        until = min((later.step for later in attempts[number + 1 :]), default=None)
        for rank, lines in start.lines.items():
            for line in lines:
                if until is None or line.step < until:
                    found[line.step, rank] = line
    return found


def wrong_words(attempts: list[Start], said: str) -> str:
    """Return a resume that was not announced as what it was, or "".

    Args:
        attempts: Of the run.
        said: What all of its ranks have logged.
    """
    worlds = {start.attempt: start.world for start in attempts}
    for attempt, parent, words in RESUMED.findall(said):
        if int(attempt) in worlds and int(parent) in worlds:
            changed = worlds[int(attempt)] != worlds[int(parent)]
            if changed is not ("same data, not bitwise" in words):
                ranks = f"{worlds[int(parent)]} -> {worlds[int(attempt)]} ranks"
                return f"attempt {attempt}, {ranks}: {words}"
    return ""


def verdict(
    attempts: list[Start], epochs: int, samples: int, reference: dict[tuple[int, int], Line] | None
) -> tuple[str, str]:
    """One of the three, and why.

    Args:
        attempts: Of a finished run.
        epochs, samples: Of its training.
        reference: What a run on the last attempt's number of ranks keeps, never stopped.
    """
    lines = kept(attempts)
    if reference is not None and lines == reference:
        return EXACT, f"{len(lines)} lines on {attempts[-1].world} ranks"
    if reference is not None and len({start.world for start in attempts}) == 1:
        places = {*lines, *reference}
        first = min(place for place in places if lines.get(place) != reference.get(place))
        return FAILED, f"differs from the uninterrupted run from {first} on"
    padding = sum(start.world - 1 for start in attempts)
    for epoch in range(epochs):
        counts = Counter(line.sample for line in lines.values() if line.epoch == epoch)
        missing = sorted(set(range(samples)) - set(counts))
        extra = sum(counts.values()) - samples
        if missing:
            return FAILED, f"epoch {epoch} lacks {missing[:10]} ({len(missing)} samples)"
        if extra > padding:
            twice = sorted(sample for sample, count in counts.items() if count > 1)
            return FAILED, f"epoch {epoch} has {extra} too many: {twice[:10]}"
    return SAME_DATA, " -> ".join(str(start.world) for start in attempts) + " ranks"
