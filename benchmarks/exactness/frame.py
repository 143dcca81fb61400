"""The frame that the frameworks' toy jobs share: which cases there are, and how one is judged.

A framework's module has

    SYSTEMS     what is compared: "trainckpt", and names for the framework's own means
    attempt     attempt(case, place, stop, record): one attempt in this process. It trains the toy
                job from the beginning if `place` is empty, else from what an earlier attempt left
                there; until the end, or until `stop`. It calls record(at, samples, loss) for each
                micro-batch of this rank

The toy job: 64 micro-batches in 4 epochs, windows of 4, dropout, samples augmented from the random
generators of whoever loads them, a validation at each epoch's end. All attempts of a case run in
one process tree, one after the other, with all objects made anew.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BATCH, EPOCH, EPOCHS, ACCUMULATE = 2, 16, 4, 4
MICRO_BATCHES = EPOCH * EPOCHS
# First, middle and last of windows and epochs; v: in the validation after so many micro-batches.
STOPS = ("1", "6", "8", "16", "v16", "17", "33", "47", "v48", "62")


class Case(NamedTuple):
    """What is tried: whose checkpoints, with how many loader workers and ranks."""

    system: str
    workers: int
    rank: int
    ranks: int


class Stop(NamedTuple):
    """After how many micro-batches an attempt is stopped, and whether inside a validation."""

    after: int
    in_validation: bool

    @classmethod
    def parse(cls, text):
        return cls(int(text.lstrip("v")), text.startswith("v"))


def judge(attempt, case, stops, meet):
    """One row: of all micro-batches trained after a resume, how many were the straight run's.

    Args:
        attempt: Of a framework's module.
        case: For this rank.
        stops: Texts as in STOPS.
        meet: Barrier of all ranks, that also gives them rank 0's value.
    """
    with folder(case, meet) as place:
        straight = _run(attempt, case, place, None)
    row = {
        "system": case.system,
        "workers": case.workers,
        "ranks": case.ranks,
        "stops": list(stops),
        "resumed": 0,
        "samples_equal": 0,
        "losses_equal": 0,
        "wrong_stops": [],
    }
    for text in stops:
        with folder(case, meet) as place:
            stop = Stop.parse(text)
            before = _run(attempt, case, place, stop)
            meet(None)
            after = _run(attempt, case, place, None)
        wanted = {at: line for at, line in straight.items() if at not in before}
        good = [
            sum(at in after and after[at][part] == line[part] for at, line in wanted.items())
            for part in (0, 1)
        ]
        whole = {**before, **after} == straight and not before.keys() & after.keys()
        row["resumed"] += len(wanted)
        row["samples_equal"] += good[0]
        row["losses_equal"] += good[1]
        if not whole:
            row["wrong_stops"].append(text)
    return row


def _run(attempt, case, place, stop):
    lines = {}

    def record(at, samples, loss):
        lines[at] = (list(samples), float(loss).hex())

    attempt(case, place, stop, record)
    return lines


@contextmanager
def folder(case, meet):
    """A folder that all ranks see, for the attempts of one run."""
    made = tempfile.mkdtemp(prefix="exactness-") if case.rank == 0 else None
    place = Path(meet(made))
    yield place
    meet(None)
    if case.rank == 0:
        shutil.rmtree(place)
