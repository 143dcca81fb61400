"""A rank whose main thread is stuck still obeys a stop that failed because the store died."""

from __future__ import annotations

import threading

from tests.ranks.fault_programs import Moment, Rank
from tests.ranks.faults import Run
from trainckpt.notice import Notice


def be_stuck_when_the_store_dies(boss, rank, size, port, moment):
    """Main of rank 2 is inside a call that never returns, such as a collective of dead ranks."""
    here = Rank(boss, rank, size, port, moment)
    if rank == 2:
        threading.Event().wait()
    while here.boundary() is None:
        if rank == 1 and here.gate.passed == 3:
            here.watcher.request(Notice("SIGTERM"))


def test_a_rank_stuck_in_a_collective_is_ended_when_the_store_dies_in_an_undecided_stop():
    """Rank 1 asked for the stop, 0 and 2 only answered: the bell has told them what it is about."""
    moment = Moment("before", "propose", "1/decision")
    run = Run(be_stuck_when_the_store_dies, 3, moment)
    assert [ended.code for ended in run.ended] == [71, 71, 71]
