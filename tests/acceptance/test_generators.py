"""Random generators that a dataset's code names as globals of its module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.data.datasets import interrupted, straight
from tests.long_cases import long

rng = np.random.default_rng(4)
drawn = torch.Generator().manual_seed(5)


def shifted(value):
    return next(value + torch.rand(1, generator=drawn).item() for _ in range(1))


class Augmented(Dataset):
    """Draws from a global in a method, or from one that a transform's code names."""

    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return self.transform(index) if self.transform else index + rng.normal()


@pytest.mark.parametrize("transform", [None, shifted], ids=["method", "function"])
@pytest.mark.parametrize("stop", [2, *long(5), 8])
def test_each_worker_goes_on_with_its_copy_of_a_global_generator(transform, stop):
    def make():
        return DataLoader(Augmented(transform), 4, shuffle=True, num_workers=2)

    whole = straight(make)
    before, after = interrupted(make, stop)
    assert before + after == whole
    assert after != whole[: len(after)]
