"""Small states: what each rank's partner keeps of it; that survivors use them: tests/faults."""

from __future__ import annotations

import threading

import pytest

from tests.end_to_end.lora import parts
from tests.ranks.processes import run_ranks
from tests.survivors.uneven import train_apart, train_at_different_times
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


@pytest.mark.parametrize("redundancy", ["partner", "none"])
def test_no_rank_waits_where_others_have_made_no_new_tensors(tmp_path, redundancy):
    first, second = run_ranks(train_at_different_times, 2, tmp_path, redundancy)
    assert not any(why_off for why_off, _ in [*first, *second])
    assert [layouts for _, layouts in first] == [layouts for _, layouts in second]
    _, layouts = first[-1]
    assert "optimizer/model/weight/exp_avg" in layouts
    assert not any(name.startswith("own_optimizer/") for name in layouts)


def test_replicas_that_drift_apart_are_found_at_once_and_each_rank_s_own_from_then_on(tmp_path):
    equal = 8
    for seen in run_ranks(train_apart, 2, tmp_path, equal):
        shared = [(1, True)] * (equal + 1)  # the state of step 5 is the last one that is equal
        assert seen == [*shared, (2, True), *[(1, False)] * 2]
