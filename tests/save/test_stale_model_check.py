"""A model that is saved and never changes is said at the second save."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.training import Parts, attempt
from trainckpt.save.checks import unchanged


def test_a_model_that_is_not_the_one_that_is_trained_is_said_once(tmp_path, caplog):
    """Its optimizer steps, and nothing of what is saved moves."""
    parts = Parts()
    parts.optimizer = torch.optim.AdamW(parts.model.parameters(), 0.0)
    parts.scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    attempt(tmp_path, epochs=3, parts=parts)
    said = [r.message for r in caplog.records if "has not changed in" in r.message]
    assert len(said) == 1
    assert said[0].startswith("model has not changed in 2 steps")


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
