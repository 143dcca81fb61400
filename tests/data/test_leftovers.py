"""A batch sampler that carries what an epoch leaves over into the next: its length changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from tests.data import datasets as d


class Leftovers(Sampler):
    """Batches of four; what is left of an epoch comes first in the next one."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __len__(self) -> int:
        return (d.LENGTH + len(self.left)) // 4

    def __iter__(self):
        self.left = self.left + torch.randperm(d.LENGTH).tolist()
        while len(self.left) >= 4:
            batch, self.left = self.left[:4], self.left[4:]
            yield batch

    def state_dict(self) -> dict[str, list[int]]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.left = list(state["left"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_whose_length_depends_on_its_state_goes_on_in_any_epoch(workers):
    def make() -> DataLoader:
        return DataLoader(d.Augmented(), batch_sampler=Leftovers(), num_workers=workers)

    want = d.straight(make)
    assert want != d.straight(make, seed=8)
    for stop in (3, 9, 14) if workers else range(1, len(want) + 1):
        before, after = d.interrupted(make, stop)
        assert before + after == want, f"stopped at boundary {stop}"


def test_a_length_that_changed_with_the_state_is_no_difference():
    def make() -> DataLoader:
        return DataLoader(d.Plain(), batch_sampler=Leftovers())

    first = d.Run(make(), stop=9)
    with pytest.raises(d.StoppedError):
        first.train()
    assert len(first.plain.batch_sampler) != len(make().batch_sampler)
    assert d.TrackedLoader(make(), name="train").differences(first.saved["data"]) == []
    other = DataLoader(range(9), batch_sampler=Leftovers())
    assert d.TrackedLoader(other, name="train").differences(first.saved["data"]) == [
        "train: dataset length was 23, is 9"
    ]
