"""Autocast around the loop: casts of weights that outlive an optimizer step are named."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer
from trainckpt.state.autocast_cache import REASON, AutocastCache
from trainckpt.state.registry import Registry

NOTHING = contextlib.nullcontext


def half(**how):
    return torch.autocast("cpu", torch.bfloat16, **how)


def train(place, around_loop=NOTHING, around_step=NOTHING, window=1, crash_at=None):
    """Losses by micro-batch; saved after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(24, 4), 2)
    losses = {}
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="1 steps"
    ) as ckpt:
        for _ in ckpt.epochs(1):
            with around_loop():
                for x in ckpt.batches():
                    number = ckpt.cursor.micro_batches
                    if number == crash_at:
                        raise Crash
                    with around_step():
                        loss = model(x).float().square().mean()
                    loss.backward()
                    if number % window == window - 1:
                        optimizer.step()
                        optimizer.zero_grad()
                    losses[number] = loss.item()
    return losses


def resumed(tmp_path, **how):
    """Losses of a run without a crash, and those after the resume of one with a crash."""
    straight = train(tmp_path / "straight", **how)
    with pytest.raises(Crash):
        train(tmp_path / "run", crash_at=6, **how)
    again = train(tmp_path / "run", **how)
    return {number: straight[number] for number in again}, again


@pytest.mark.parametrize("window", [1, 3])
def test_casts_that_outlive_a_step_are_named_as_training_begins_and_by_a_resume(
    tmp_path, caplog, window
):
    caplog.set_level(logging.INFO, "trainckpt")
    straight, again = resumed(tmp_path, around_loop=half, window=window)
    assert again != straight, "else nothing need be said"
    said = [message for message in caplog.messages if REASON in message]
    assert said == [f"not exact: {REASON}"] * 3
    if window == 1:
        assert "this resume is bitwise" not in caplog.text


@pytest.mark.parametrize(
    "how",
    [
        {"around_step": half},
        {"around_loop": lambda: half(cache_enabled=False)},
        {"around_loop": lambda: half(enabled=False)},
        {"around_step": half, "window": 3},
    ],
    ids=["around the forward pass", "without a cache", "not enabled", "in windows"],
)
def test_a_cache_that_holds_no_old_weight_is_exact_and_nothing_is_said(tmp_path, caplog, how):
    caplog.set_level(logging.INFO, "trainckpt")
    straight, again = resumed(tmp_path, **how)
    assert again == straight
    assert "this resume is bitwise" in caplog.text
    assert "autocast" not in caplog.text


def test_a_model_on_a_device_without_autocast_is_looked_at_without_an_error():
    """On the meta device torch refuses even the question."""
    registry = Registry()
    registry.add("model", nn.Linear(2, 2, device="meta"))
    assert not AutocastCache(registry).outlives_step(1)


def test_weights_that_autocast_does_not_cast_are_not_named(tmp_path, caplog):
    """Of a model in bfloat16."""
    for dtype, named in ((torch.bfloat16, False), (torch.float32, True)):
        registry = Registry()
        registry.add("model", nn.Linear(2, 2, dtype=dtype))
        cache = AutocastCache(registry)
        with half():
            assert [cache.outlives_step(step) for step in (0, 0, 1, 2)] == [
                False,
                False,
                named,
                False,
            ]
