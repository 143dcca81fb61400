"""The rows of flat partitions, as another number of ranks reads them."""

from __future__ import annotations

import pytest
import torch

from trainckpt.format.layout import replicated
from trainckpt.format.manifest import TensorEntry
from trainckpt.state.adapters.partitioned_optimizer import filled, is_divided, rows_of

PAIR = 2  # DeepSpeed fills up to a multiple of two elements a rank


def divided(elements, world):
    """A parameter group as DeepSpeed divides it, with zeros at the end."""
    length = -(-elements // (PAIR * world)) * PAIR
    return torch.arange(1.0, elements + 1).new_zeros(world * length), length


@pytest.mark.parametrize("elements", [1, 5, 8, 13, 64])
@pytest.mark.parametrize("then", [1, 2, 3, 8])
@pytest.mark.parametrize("now", [1, 2, 3, 8])
def test_every_rank_finds_its_elements_and_zeros_behind_them(elements, then, now):
    stored, _ = divided(elements, then)
    stored[:elements] = torch.arange(1.0, elements + 1)
    wanted, length = divided(elements, now)
    wanted[:elements] = torch.arange(1.0, elements + 1)
    parts = []
    for rank in range(now):
        box = rows_of(rank, length, len(stored))
        first, count = box.offset[0], box.shape[0]
        parts.append(filled(stored[first : first + count], length))
    assert torch.equal(torch.cat(parts), wanted)


def test_a_part_that_needs_no_zeros_is_not_copied():
    rows = torch.ones(4)
    assert filled(rows, 4) is rows


def test_only_divided_tensors_of_one_dimension_are_partitions():
    """A step counter is equal on all ranks, and so stored whole."""
    assert not is_divided(TensorEntry("F32", (8,), replicated(2)))
    assert not is_divided(TensorEntry("F32", (8,), None))
