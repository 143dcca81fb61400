"""A resume says of each loader what its snapshot does not hold."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.lifecycle.training import record
from trainckpt import Checkpointer


class Packs:
    """A collate_fn that carries samples on to the next batch."""

    def __init__(self) -> None:
        self.rest: list[torch.Tensor] = []

    def __call__(self, samples):
        self.rest += samples
        packed, self.rest = self.rest[:3], self.rest[3:]
        return torch.stack(packed)


class KeptPacks(Packs):
    """As Packs, and says so."""

    def state_dict(self):
        return {"rest": self.rest}

    def load_state_dict(self, state):
        self.rest = state["rest"]


def attempt(place, packs, until: int) -> list[list[float]]:
    """Train up to a micro-batch; return what it was trained on."""
    model, seen = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(40.0), batch_size=4, collate_fn=packs)
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader) as ckpt:
        for _ in ckpt.epochs(2):
            for batch in ckpt.batches():
                seen.append(batch.tolist())
                model(batch[:, None] / 40).sum().backward()
                optimizer.step()
                if ckpt.cursor.micro_batches == until - 1:
                    return seen
    return seen


def test_a_remainder_that_is_not_kept_is_named_and_one_that_is_kept_goes_on(tmp_path):
    straight = attempt(tmp_path / "straight", KeptPacks(), 99)
    for until in (4, 13):
        place = tmp_path / f"kept{until}"
        came = attempt(place, KeptPacks(), until) + attempt(place, KeptPacks(), 99)
        assert came == straight
        assert record(place, 2)["outcome"]["exactness"] == "bitwise"
    place = tmp_path / "lost"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each attempt warns as it trains
        attempt(place, Packs(), 4), attempt(place, Packs(), 5)
    assert record(place, 2)["outcome"]["exactness"] == "same data, not bitwise"
