"""Small states: what each rank's partner keeps of it; that survivors use them: tests/faults."""

from __future__ import annotations

import threading

from tests.end_to_end.lora import parts
from tests.ranks.processes import run_ranks
from trainckpt import Checkpointer

# Waits for a fence in Python alone, which the end of a process does not disturb.
HARMLESS = {"MainThread", "trainckpt-moment"}


def leave(rank, place):
    """Names of the threads that are left when the attempt has ended."""
    with Checkpointer(
        place, **parts(rank, 2), every="never", survivors="30 s", redundancy="partner"
    ) as ckpt:
        for number, _ in enumerate(ckpt.batches()):
            if number == 3:
                break
        assert "trainckpt-small" in {thread.name for thread in threading.enumerate()}
    return {thread.name for thread in threading.enumerate()}


def test_nobody_takes_a_group_apart_when_the_attempt_has_ended(tmp_path):
    # A process that ends meanwhile is aborted, whatever its exit code was to be.
    for names in run_ranks(leave, 2, tmp_path):
        assert names <= HARMLESS
