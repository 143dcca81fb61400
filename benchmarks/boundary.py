"""What a boundary without a notice costs: `python -m benchmarks.boundary --json OUT`.

The median over rounds of the mean time per call, with a live watcher beside it. The goal for a
whole boundary of a Checkpointer is 5 microseconds; so far this measures the agreement's part.
To measure more, add a function to `SUBJECTS` that yields the call to time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from trainckpt.preemption import SignalSource
from trainckpt.ranks import BoundaryGate, NoticeWatcher, World, local_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GOAL_US = 5.0


@contextlib.contextmanager
def agreement_alone() -> Iterator[Callable[[], object]]:
    """`Agreement.at_boundary` on one rank, signals watched."""
    gate = BoundaryGate()
    watcher = NoticeWatcher(gate, local_store(World(0, 1, 0, "here")), [SignalSource()])
    watcher.start()
    yield gate.at_boundary
    watcher.stop()


@contextlib.contextmanager
def agreement_and_check() -> Iterator[Callable[[], object]]:
    """The same, and the look whether the wakeup descriptor is still ours."""
    gate, source = BoundaryGate(), SignalSource()
    watcher = NoticeWatcher(gate, local_store(World(0, 1, 0, "here")), [source])
    watcher.start()

    def boundary() -> object:
        source.check()
        return gate.at_boundary()

    yield boundary
    watcher.stop()


@contextlib.contextmanager
def whole_boundary() -> Iterator[Callable[[], object]]:
    """`Checkpointer.boundary`, all that is asked when a script takes its next batch."""
    model = torch.nn.Linear(4, 4)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        tempfile.TemporaryDirectory() as run,
        trainckpt.Checkpointer(run, model=model, optimizer=optimizer, loader=loader) as ckpt,
    ):
        next(iter(ckpt.batches()))
        yield ckpt.boundary


SUBJECTS = {
    "agreement": agreement_alone,
    "agreement and check": agreement_and_check,
    "checkpointer": whole_boundary,
}


def measure(call: Callable[[], object], calls: int) -> float:
    """Mean microseconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def row(name: str, rounds: int, calls: int) -> dict[str, object]:
    """One subject's result, for the table and the JSON."""
    with SUBJECTS[name]() as call:
        measure(call, calls // 10)
        taken = [measure(call, calls) for _ in range(rounds)]
    return {
        "subject": name,
        "median_us": statistics.median(taken),
        "rounds_us": taken,
        "calls": calls,
        "goal_us": GOAL_US,
    }


def main() -> None:
    """Measure every subject, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200_000)
    given = parser.parse_args()
    rows = [row(name, given.rounds, given.calls) for name in SUBJECTS]
    for line in rows:
        print(f"{line['subject']:<24} {line['median_us']:.3f} us per boundary (goal {GOAL_US} us)")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
