"""Each rule of the protocol is needed: without it the explorer finds the fault, and a way to it."""

from __future__ import annotations

import pytest

from tests.explorer.explore import explore
from tests.explorer.near_misses import near_misses

MISSES = {miss.setup.name: miss for miss in near_misses()}


@pytest.mark.parametrize("miss", MISSES.values(), ids=list(MISSES))
def test_a_protocol_without_one_of_its_rules_has_a_run_that_ends_in_a_fault(miss):
    """The shortest such run ends with where each rank is."""
    report = explore(miss.setup, until=miss.fault)
    assert miss.fault in report.faults
    trace = report.traces[miss.fault]
    assert len(trace) > len(miss.setup.programs)
    assert [line[:9] for line in trace[-3:]] == ["=> rank 0", "=> rank 1", "=> rank 2"]


def test_a_trace_tells_how_a_count_raised_outside_the_lock_splits_the_ranks():
    """Rank 0 looked before it published 0, and passed afterwards."""
    miss = MISSES["passed is raised outside the lock, none"]
    trace = explore(miss.setup, until=miss.fault).traces[miss.fault]
    look = trace.index("rank 0  boundary 0.0: look")
    publishes = trace.index("rank 0  sends round 1")
    decided = trace.index("store   is decided round 1 stop beyond 0")
    passes = trace.index("rank 0  boundary 0.0: pass")
    assert look < publishes < decided < passes


def test_a_trace_tells_how_a_rank_inside_a_collective_misses_a_stop_that_failed():
    """Somebody is in a reduction that nobody else will enter any more."""
    miss = MISSES["only main obeys a failed stop, timers"]
    trace = explore(miss.setup, until=miss.fault).traces[miss.fault]
    ends = [line for line in trace if line.startswith("=>")]
    assert any("stuck at collective" in line for line in ends)
    assert any("ended with 71" in line for line in ends)
