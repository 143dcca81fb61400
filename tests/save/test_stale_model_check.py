"""A model that is saved and does not change while its optimizer steps is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.training import Parts, attempt
from trainckpt import Checkpointer
from trainckpt.save.checks import unchanged


def test_a_model_that_is_not_the_one_that_is_trained_is_said_once(tmp_path, caplog):
    """Its optimizer steps, and nothing of what is saved moves."""
    parts = Parts()
    parts.optimizer = torch.optim.AdamW(parts.model.parameters(), 0.0)
    parts.scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    attempt(tmp_path, epochs=6, parts=parts)
    said = [r.message for r in caplog.records if "has not changed in" in r.message]
    assert len(said) == 1
    assert said[0].startswith("model has not changed in 8 steps of its optimizer")


@pytest.mark.parametrize("every", [1, 4])
def test_models_that_are_trained_in_turn_are_not(tmp_path, caplog, every):
    """In phases of 12 steps: only one of the two optimizers steps."""
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    tracked = {"model": models, "optimizer": optimizers, "every": f"{every} steps"}
    with Checkpointer(tmp_path, loader=DataLoader(torch.randn(48, 2)), **tracked) as ckpt:
        for x in ckpt.batches():
            turn = ckpt.cursor.micro_batches // 12 % 2
            models[turn](x).sum().backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
    assert "has not changed" not in caplog.text


def test_a_model_that_is_trained_is_not(tmp_path, caplog):
    attempt(tmp_path, epochs=3)
    assert "has not changed" not in caplog.text


def test_a_model_is_unchanged_only_if_every_region_of_it_is():
    before = {"a/w": "1", "a/b": "2", "b/w": "3", "c/w": "4"}
    now = {"a/w": "1", "a/b": "x", "b/w": "3", "d/w": "5"}
    assert unchanged(before, now) == ["b"]


def test_frozen_parameters_are_not_looked_at(tmp_path, caplog):
    parts = Parts()
    frozen = nn.Linear(4, 4)
    frozen.requires_grad_(False)
    parts.frozen = frozen
    attempt(tmp_path, epochs=3, parts=parts)
    assert "has not changed" not in caplog.text
