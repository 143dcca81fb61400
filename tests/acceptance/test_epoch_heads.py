"""Scripts that draw random numbers at the head of an epoch, before its first batch."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash
from tests.long_cases import long_unless
from trainckpt import Checkpointer


def train(place, has_loader, stop=None):
    """Train three epochs of five micro-batches; return those trained on."""
    torch.manual_seed(0)
    random.seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data, got = torch.randn(20, 4), []
    tracked = {"loader": DataLoader(data, 4, shuffle=True)} if has_loader else {}
    with Checkpointer(place, every="1 steps", model=model, optimizer=optimizer, **tracked) as ckpt:
        for epoch in ckpt.epochs(3):
            scale, order = random.random(), torch.randperm(20)
            for batch in ckpt.batches() if has_loader else parts(ckpt, data, order):
                loss = model(torch.nn.functional.dropout(batch) * scale).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                got.append((epoch, loss.item().hex()))
                if len(got) == stop:
                    raise Crash
    return got


def parts(ckpt, data, order):
    done = ckpt.cursor.batches  # of this epoch
    for ids in order.split(4)[done:]:
        ckpt.boundary()
        yield data[ids]


@pytest.mark.parametrize("has_loader", [True, False], ids=["loader", "boundary"])
@pytest.mark.parametrize(
    "stop", long_unless((2, 6, 9).__contains__, [2, 5, 6, 7, 9, 10, 11, 12, 15])
)
def test_the_head_of_the_epoch_resumed_in_draws_the_same(tmp_path, caplog, stop, has_loader):
    whole = train(tmp_path / "straight", has_loader)
    with pytest.raises(Crash):
        train(tmp_path / "run", has_loader, stop)
    caplog.set_level(logging.INFO, "trainckpt")
    rest = train(tmp_path / "run", has_loader)
    assert rest == whole[stop - 1 :]
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text
