"""Prints what was explored: `python -m tests.explorer [--full] [--traces]`."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import chain

from tests.explorer.explore import Report, explore
from tests.explorer.near_misses import near_misses
from tests.explorer.setups import larger, protocol


def main() -> int:
    """Exit code 1 if the protocol has a fault, or a near-miss has not the one it should have."""
    parser = argparse.ArgumentParser(prog="python -m tests.explorer")
    parser.add_argument("--full", action="store_true", help="the larger setups too: minutes")
    parser.add_argument("--traces", action="store_true", help="print the way to each fault")
    options = parser.parse_args()
    began, wrong, states = time.perf_counter(), 0, 0
    print("The protocol:")
    for setup in chain(protocol(), larger() if options.full else ()):
        report = explore(setup)
        states += report.states
        wrong += bool(report.faults)
        _show(report, traces=bool(report.faults))
    print("Near-misses, with the fault that each must have:")
    for miss in near_misses():
        report = explore(miss.setup)
        states += report.states
        wrong += miss.fault not in report.faults
        _show(report, traces=options.traces)
    print(f"{states} states in {time.perf_counter() - began:.0f} s; {wrong} not as expected")
    return 1 if wrong else 0


def _show(report: Report, *, traces: bool) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(report.faults.items()))
    print(
        f"{report.setup.name:52s} {report.states:8d} states {report.seconds:6.1f} s  "
        f"last states: {ends or 'none'}; faults: {faults or 'none'}",
        flush=True,
    )
    if traces:
        for fault, lines in report.traces.items():
            print(f"    {fault}:", *lines, sep="\n        ")


if __name__ == "__main__":
    sys.exit(main())
