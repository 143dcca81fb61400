"""What ranks hold alike is found by samples; what was found to differ is each rank's own then."""

from __future__ import annotations

import logging

import torch

from trainckpt.lifecycle.saving.comparing import Comparing
from trainckpt.snapshot.save_plan import equal_groups
from trainckpt.state.captured import Captured
from trainckpt.state.replicas import PARTS

NUM_BYTES = 4 * PARTS * 4096
GROUP = "model parameters"


def state(tensor):
    return Captured(tensors={"w": tensor}, groups={"w": GROUP})


class Two:
    """Two ranks with a tensor that one of them may change alone."""

    def __init__(self):
        self.ranks = [Comparing(rank, 2) for rank in range(2)]
        self.tensors = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(2)]

    def save(self, *, last=False, skipped=False):
        """Whether they are found alike; both come to the same result."""
        states = [state(tensor) for tensor in self.tensors]
        mine = [
            rank.digests(one, ["w"], last=last)
            for rank, one in zip(self.ranks, states, strict=True)
        ]
        if skipped:
            return None
        found = equal_groups(mine)
        results = [
            rank.alike(found, own, one, ["w"])
            for rank, own, one in zip(self.ranks, mine, states, strict=True)
        ]
        assert results[0] == results[1]
        return bool(results[0])


def test_what_drifted_in_one_byte_is_found_and_stays_apart_until_all_bytes_are_compared(caplog):
    two = Two()
    assert two.save()
    two.tensors[1][NUM_BYTES // 2] = 1
    with caplog.at_level(logging.WARNING, "trainckpt"):
        results = [two.save() for _ in range(3 * PARTS)]
    first = results.index(False)
    assert first < PARTS
    assert not any(results[first:])
    assert caplog.text.count("model parameters: the ranks held this alike") == 1
    two.tensors[1][NUM_BYTES // 2] = 0
    assert not two.save()
    assert two.save(last=True)
    assert two.save()


def test_the_first_comparison_that_counts_is_of_all_bytes():
    two = Two()
    two.tensors[1][-1] = 1
    two.save(skipped=True)
    assert not two.save()
    assert not two.save()


def test_skipped_saves_leave_no_byte_out():
    two = Two()
    assert two.save()
    two.tensors[1][-1] = 1
    results = []
    for _ in range(PARTS):
        two.save(skipped=True)
        results.append(two.save())
    assert not all(results)


def test_a_rank_alone_compares_nothing():
    alone = Comparing(0, 1)
    assert alone.digests(state(torch.zeros(4)), ["w"], last=False) == {}
    assert alone.alike([], {}, state(torch.zeros(4)), ["w"]) == []
