"""What a boundary without a notice costs: `python -m benchmarks.boundary --json OUT`.

The median over rounds of the mean time per call, with a live watcher beside it. The goal for a
whole boundary of a Checkpointer is 5 microseconds; so far this measures the agreement's part.
To measure more, add a function to `SUBJECTS` that yields the call to time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
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


@contextlib.contextmanager
def scraped_boundary() -> Iterator[Callable[[], object]]:
    """The same with metrics, which another process scrapes each second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["TRAINCKPT_METRICS"] = f"http:127.0.0.1:{port}"
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, str(port)])
    try:
        with whole_boundary() as call:
            yield call
    finally:
        scraper.kill()
        scraper.wait()
        del os.environ["TRAINCKPT_METRICS"]


SCRAPER = """
import sys, time, urllib.request
while True:
    time.sleep(1)
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics").read()
    except OSError:
        pass
"""

SUBJECTS = {
    "agreement": agreement_alone,
    "agreement and check": agreement_and_check,
    "checkpointer": whole_boundary,
    "checkpointer, scraped": scraped_boundary,
}


def measure(call: Callable[[], object], calls: int) -> float:
    """Mean microseconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def round_of(name: str, calls: int) -> float:
    """One round of one subject, made anew."""
    with SUBJECTS[name]() as call:
        measure(call, calls // 10)
        return measure(call, calls)


def row(name: str, taken: list[float], calls: int) -> dict[str, object]:
    """One subject's result, for the table and the JSON."""
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
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    given = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in given.subjects}
    for _ in range(given.rounds):  # interleaved: the machine is busier at times
        for name, found in taken.items():
            found.append(round_of(name, given.calls))
    rows = [row(name, found, given.calls) for name, found in taken.items()]
    for line in rows:
        print(f"{line['subject']:<24} {line['median_us']:.3f} us per boundary (goal {GOAL_US} us)")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
