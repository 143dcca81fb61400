"""What tracking a DataLoader costs: TrackedLoader against the plain loader at 5 ms per batch.

Beside it torchdata's StatefulDataLoader, the usual way to keep a position. All run in turn,
`--rounds` times. Seconds are medians; the overhead is the median of the rounds' ratios, which a
machine that gets slower or faster on the way does not move. The dataset draws from all three random
generators for every sample, so each batch brings its worker's randomness along.

    python -m benchmarks.loader --json benchmarks/results/loader.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainckpt.data.loader import TrackedLoader

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH_SECONDS = 0.005


class Drawing(Dataset[Any]):
    """Small samples whose worker's generators all change."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, float]:
        return torch.rand(16), float(np.random.rand()), random.random()


def seconds(loader: Iterable[Any]) -> float:
    """Time the batches after the first, which starts the workers, without the end of the pass."""
    batches = iter(loader)
    next(batches)
    start = now = time.perf_counter()
    for _ in batches:
        time.sleep(BATCH_SECONDS)
        now = time.perf_counter()
    return now - start


def row(workers: int, batches: int, rounds: int) -> dict[str, float]:
    """Measure all kinds in turn, the order swapped each round."""
    data = Drawing(8 * batches)
    loader = DataLoader(data, batch_size=8, num_workers=workers)
    kinds: dict[str, Iterable[Any]] = {
        "plain": loader,
        "tracked": TrackedLoader(loader, name="bench", on_boundary=lambda: None),
        "stateful": StatefulDataLoader(data, batch_size=8, num_workers=workers),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in sorted(kinds, reverse=bool(number % 2)):
            times[kind].append(seconds(kinds[kind]))

    def overhead(kind: str) -> float:
        ratios = [t / p for t, p in zip(times[kind], times["plain"], strict=True)]
        return 100 * (statistics.median(ratios) - 1)

    return {
        "workers": workers,
        **{f"{kind}_s": statistics.median(times[kind]) for kind in kinds},
        "overhead_percent": overhead("tracked"),
        "stateful_overhead_percent": overhead("stateful"),
    }


def main() -> None:
    """Measure, print a table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    rows = [row(workers, given.batches, given.rounds) for workers in (0, 2)]
    print("workers   plain s   tracked s   overhead %   StatefulDataLoader s   overhead %")
    for line in rows:
        print(
            "{workers:7} {plain_s:9.3f} {tracked_s:11.3f} {overhead_percent:12.2f} "
            "{stateful_s:22.3f} {stateful_overhead_percent:12.2f}".format(**line)
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
