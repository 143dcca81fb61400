"""An optimizer that the script makes with other options than the run had: which value counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainckpt import Checkpointer

PARTS = {"lr": (0.1, 0.5), "weight_decay": (0.0, 0.25), "betas": ((0.9, 0.999), (0.8, 0.9))}


def trained(place, steps, *, warms_up=False, on_the_way=None, in_the_loop=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 9 if warms_up else 1)
    with Checkpointer(place, model=model, optimizer=optimizer, schedule=schedule) as ckpt:
        optimizer.param_groups[0].update(on_the_way or {})
        while ckpt.cursor.step < steps:
            ckpt.boundary()
            optimizer.param_groups[0].update(in_the_loop or {})
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return optimizer.param_groups[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_resume_says_once_that_the_value_of_the_snapshot_counts(tmp_path, caplog, name):
    then, now = PARTS[name]
    trained(tmp_path, 2, **{name: then})
    for steps in (4, 6):  # the second resume says it too
        caplog.clear()
        group = trained(tmp_path, steps, **{name: now})
        assert group[name] == then
        said = [
            line for line in caplog.messages if f"optimizer: {name} {then} then, {now} " in line
        ]
        assert len(said) == 1
        assert "The saved value is used, unless the script sets it" in said[0]


def test_a_schedule_that_has_moved_the_rate_is_no_change(tmp_path, caplog):
    trained(tmp_path, 2, warms_up=True, lr=0.1)
    trained(tmp_path, 4, warms_up=True, lr=0.1)
    assert " then, " not in caplog.text


def test_a_value_set_between_resume_and_first_batch_is_undone_and_named(tmp_path, caplog):
    trained(tmp_path, 2, lr=0.1)
    group = trained(tmp_path, 4, lr=0.1, on_the_way={"weight_decay": 0.5})
    assert group["weight_decay"] == 0.01
    (line,) = [line for line in caplog.messages if "weight_decay 0.5 set, 0.01 saved" in line]
    assert "set it in the loop, once a batch is there" in line


def test_a_value_set_in_the_loop_counts(tmp_path, caplog):
    trained(tmp_path, 2, lr=0.1)
    assert trained(tmp_path, 4, lr=0.1, in_the_loop={"weight_decay": 0.5})["weight_decay"] == 0.5
    assert " set, " not in caplog.text
