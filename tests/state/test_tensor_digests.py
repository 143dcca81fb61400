"""Between the first save and the last, replicas are compared by samples that reach every byte."""

from __future__ import annotations

import torch

from trainckpt.state.captured import Captured
from trainckpt.state.tensor_digests import PARTS, group_digests

NUM_BYTES = 4 * PARTS * 4096 + 12


def digests(tensor, number):
    captured = Captured(tensors={"w": tensor}, groups={"w": "model parameters"})
    return group_digests(captured, 0, 2, sampled=["w"], number=number)


def test_a_single_byte_that_drifted_is_seen_within_as_many_saves_as_there_are_parts():
    good = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    for at in (0, 5000, NUM_BYTES // 3, NUM_BYTES - 1):
        drifted = good.clone()
        drifted[at] = 1
        saves = range(9, 9 + PARTS)
        assert any(digests(drifted, n) != digests(good, n) for n in saves)


def test_a_sample_is_a_small_part_of_a_large_tensor():
    seen = 0
    for at in range(0, NUM_BYTES, NUM_BYTES // 199):
        drifted = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        before = digests(drifted, 3)
        drifted[at] = 1
        seen += digests(drifted, 3) != before
    assert 1 <= seen <= 2 * 199 // PARTS + 1
