"""The choice between a snapshot and a dump, row by row."""

from __future__ import annotations

import pytest

from trainckpt.lifecycle.dump_choice import BOTH, DUMP, NOTHING, SNAPSHOT, DumpFacts, choose

LATE = {"instrumented": True, "seconds_left": 8.0, "boundary_s": 20.0, "dump_s": 2.0}
EARLY = {**LATE, "boundary_s": 3.0}
BARE = {"instrumented": False, "seconds_left": 8.0, "dump_s": 2.0}


@pytest.mark.parametrize(
    ("facts", "what", "why"),
    [
        ({**EARLY, "changes": "the world changes"}, SNAPSHOT, "the world changes"),
        ({**LATE, "changes": "the driver changes"}, SNAPSHOT, "the driver changes"),
        (EARLY, SNAPSHOT, "in about 3.0 s, 8.0 s are left"),
        ({**LATE, "seconds_left": None}, SNAPSHOT, "a boundary can be reached"),
        ({**LATE, "boundary_s": None}, SNAPSHOT, "8.0 s are left"),
        ({**EARLY, "asked": True}, BOTH, "then a dump on top"),
        ({**EARLY, "asked": True, "why_no_dump": "there is no CRIU"}, SNAPSHOT, "no CRIU"),
        ({**EARLY, "asked": True, "dump_s": 9.0}, SNAPSHOT, "would take about 9.0 s"),
        (LATE, DUMP, "the next boundary is saved in about 20.0 s"),
        ({**LATE, "hosts": 2}, NOTHING, "2 hosts: what was flushed stands"),
        ({**LATE, "host_returns": False}, NOTHING, "will come back"),
        ({**LATE, "why_no_dump": "it holds a GPU"}, NOTHING, "it holds a GPU"),
        ({**LATE, "dump_s": 9.0}, NOTHING, "would take about 9.0 s of the 8.0 s left"),
        (BARE, DUMP, "no Checkpointer"),
        ({**BARE, "seconds_left": None, "dump_s": 1e9}, DUMP, "no Checkpointer"),
        ({**BARE, "dump_s": 9.0}, NOTHING, "9.0 s of the 8.0 s left"),
        ({**BARE, "why_no_dump": "there is no CRIU"}, NOTHING, "there is no CRIU"),
        ({**BARE, "hosts": 2}, NOTHING, "2 hosts"),
        ({**BARE, "changes": "the world changes"}, NOTHING, "the world changes"),
    ],
)  # fmt: skip
def test_the_first_row_that_matches_decides_and_says_why(facts, what, why):
    found = choose(DumpFacts(**facts))
    assert found.what == what
    assert why in found.why
