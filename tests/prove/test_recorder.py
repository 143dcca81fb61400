"""What a proof compares of the state at a boundary."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainckpt import Checkpointer
from trainckpt.recording.recorder import state_digests


class Counts(IterableDataset):
    """Its state says where it is, and how it came there."""

    def __init__(self):
        self.at, self.ways = 0, 0

    def __iter__(self):
        for number in range(self.at, 6):
            self.at, self.ways = number + 1, self.ways + 1
            yield number

    def state_dict(self):
        return {"at": self.at, "ways": self.ways}

    def load_state_dict(self, state):
        self.at, self.ways = state["at"], 0


@pytest.mark.parametrize("data", [Counts(), list(range(6))], ids=["stream", "map"])
def test_what_a_stream_says_of_its_own_place_is_not_compared(tmp_path, data):
    """After a resume it may say the same place otherwise; which batches follow is compared."""
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, loader=DataLoader(data, 2)) as ckpt:
        batches = ckpt.batches()
        next(batches)
        next(batches)
        parts = state_digests(ckpt._registry)
    assert parts["loader.batches"] == "2"
    own = [part for part in parts if part.startswith(("loader.own.", "loader.trial."))]
    assert own == []
    assert parts["loader.kind"] == ("'iterable'" if isinstance(data, Counts) else "'map'")
