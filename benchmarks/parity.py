"""What parity costs a core: XOR and Reed-Solomon beside copying the same bytes, and rebuilding.

Every round runs each in turn over the same members; rates are medians of the rounds, in bytes of
data (not of parity) a second, on one thread. The floor is a copy of every member into memory that
was touched before.

    python -m benchmarks.parity --json benchmarks/results/parity.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.snapshot import parity

if TYPE_CHECKING:
    from collections.abc import Callable

CODES = {"xor:8": (7, 1), "rs:8+2": (8, 2), "rs:8+3": (8, 3)}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy(members: list[bytes], into: bytearray) -> None:
    view = memoryview(into)
    for member in members:
        view[:] = member


def rates(num_data: int, num_parity: int, num_bytes: int, rounds: int) -> dict[str, float]:
    """Encode, rebuild as many as may be lost, copy: in turn, the first round not counted."""
    members = [random.randbytes(num_bytes) for _ in range(num_data)]
    views = [memoryview(member) for member in members]
    parities = [memoryview(bytearray(num_bytes)) for _ in range(num_parity)]
    lost = {n: memoryview(bytearray(num_bytes)) for n in range(num_parity)}
    into = bytearray(num_bytes)

    def rebuild() -> None:
        present = {n: each for n, each in enumerate([*views, *parities]) if n not in lost}
        parity.rebuild(present, lost, num_data, num_parity)

    calls = {
        "encode": lambda: parity.encode(views, dict(enumerate(parities)), num_parity),
        "rebuild": rebuild,
        "copy": lambda: copy(members, into),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            spent = seconds(call)
            if number:
                taken[name].append(spent)
    assert [bytes(each) for each in lost.values()] == members[:num_parity]
    total = num_data * num_bytes / 1e9
    return {name: round(total / statistics.median(each), 2) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=32, help="of each member")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for code, (num_data, num_parity) in CODES.items():
        found = rates(num_data, num_parity, int(options.megabytes * 1e6), max(options.rounds, 5))
        rows.append({"code": code, **{f"{name}_gb_per_s": rate for name, rate in found.items()}})
        print(
            f"{code:8} encode {found['encode']:6.2f}  rebuild {found['rebuild']:6.2f}  "
            f"copy {found['copy']:6.2f} GB/s of data"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
