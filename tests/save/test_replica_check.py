"""What ranks hold alike is found by samples; what was found to differ is each rank's own then."""

from __future__ import annotations

import logging

import torch

from trainckpt.save.deduplication import ReplicaCheck, compare
from trainckpt.state.captured import Captured
from trainckpt.state.tensor_digests import PARTS

NUM_BYTES = 4 * PARTS * 4096
GROUP = "model parameters"


def state(tensor):
    return Captured(tensors={"w": tensor}, groups={"w": GROUP})


class Two:
    """Two ranks with a tensor that one of them may change alone."""

    def __init__(self):
        self.ranks = [ReplicaCheck(rank, 2) for rank in range(2)]
        self.tensors = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(2)]

    def save(self, *, final=False, skipped=False, lost_by=None, stepped=(("w",), ("w",))):
        """Whether they are found alike; both come to the same result."""
        states = [state(tensor) for tensor in self.tensors]
        answers = [
            rank.report(one, names, final=final)
            for rank, one, names in zip(self.ranks, states, stepped, strict=True)
        ]
        if skipped:
            return None
        verdict = compare(answers)
        told = [r for number, r in enumerate(self.ranks) if number != lost_by]
        results = [rank.equal_groups(verdict) for rank in told]
        assert results.count(results[0]) == len(results)
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
    assert caplog.text.count("model parameters: the ranks' copies were equal and now differ") == 1
    two.tensors[1][NUM_BYTES // 2] = 0
    assert not two.save()
    assert two.save(final=True)
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


def test_a_rank_that_did_not_hear_of_one_comparison_spoils_no_other(caplog):
    two = Two()
    assert two.save()
    two.tensors[0][:] = two.tensors[1][:] = torch.arange(NUM_BYTES).to(torch.uint8)
    assert two.save(lost_by=1)
    with caplog.at_level(logging.WARNING, "trainckpt"):
        assert not two.save()  # they looked at different parts, so nothing is known
    assert all(two.save() for _ in range(3))
    assert caplog.text == ""


def test_what_differs_is_apart_for_all_though_only_some_sample_it():
    two = Two()
    assert two.save()
    two.tensors[1][:] = 1
    assert not two.save(stepped=(("w",), ()))
    two.tensors[1][:] = 0
    assert not two.save()
    assert two.save(final=True)


def test_a_rank_alone_compares_nothing():
    alone = ReplicaCheck(0, 1)
    assert alone.report(state(torch.zeros(4)), ["w"], final=False) == {}
    assert alone.equal_groups(compare([{}])) == []
